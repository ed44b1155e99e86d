"""What a training worker does with nemo_automodel.

setup.py             device mesh, model, optimizer groups, the policy's tensors by their Hugging Face names
data.py              micro-batches and their layout in rows
train.py             forward, loss, backward, clipping, stepping
postprocess.py       from logits to log-probabilities
checkpoint.py        saving, resuming, Hugging Face export
recorded_policy.py   the policy's states on disk in place of its forward
cpu_shim.py          lets nemo_automodel build models without CUDA
draft/               the draft beside the policy
"""
