"""Drafts that vLLM has no path for, served by a small addition to it.

A module here is named to the engine by "module:function" and runs inside the engine's process, before the engine is
built; nothing of the training side is imported there. Only what the engine cannot serve by itself is added:

    sequential_head  a proposer for block drafts that fix their tokens from left to right; knows no algorithm
    dspark           its model class for the V1 runner, which CPU engines use; on CUDA vLLM serves it natively
    domino           its model class; vLLM has none on any device

Nothing is imported here: the files need vLLM.
"""
