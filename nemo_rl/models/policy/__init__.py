"""The policy as the training loop sees it, and the workers behind it.

config.py       schema of `policy` (no torch)
layout.py       which parallel layouts the workers can form (no torch)
interfaces.py   what the loop may call
lm_policy.py    `Policy`: shards batches over the workers and folds their results
sharding.py     which worker gets which samples
results.py      what the workers return, and how it is folded (no torch)
workers/        one process per device; lifecycle and remote calls only, the computation is in models/automodel
"""
