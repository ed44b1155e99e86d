"""The policy as the training loop sees it, and the workers behind it.

config.py       schema of `policy` (no torch)
interfaces.py   what the loop may call
lm_policy.py    `Policy`: shards batches over the workers and folds their results
workers/        one process per device; lifecycle and remote calls only, the computation is in models/automodel
"""
