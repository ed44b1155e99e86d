"""The training algorithm, written against interfaces: only grpo_setup.py names backends, nothing a draft algorithm.

config.py             the whole configuration (`MasterConfig`); conflicts.py: what must agree between its sections
grpo.py               the step loop
grpo_setup.py         builds what the loop needs from a valid configuration
advantages.py         group-relative advantages, reward scaling and shaping
loss.py               clipped policy-gradient loss
dynamic_sampling.py   DAPO's resampling of prompts without signal
validation.py         evaluation rounds
metrics.py            folds (numerator, denominator) pairs into numbers
"""
