"""The training algorithm, written against interfaces; no backend and no draft algorithm is named here.

config.py             the whole configuration (`MasterConfig`) and what must agree between its sections
grpo.py               the step loop
grpo_setup.py         builds what the loop needs from a valid configuration
advantages.py         group-relative advantages, reward scaling and shaping
loss.py               clipped policy-gradient loss
dynamic_sampling.py   DAPO's resampling of prompts without signal
validation.py         evaluation rounds
metrics.py            folds (numerator, denominator) pairs into numbers
"""
