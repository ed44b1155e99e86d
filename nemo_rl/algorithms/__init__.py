"""The training algorithms, written against interfaces: only *_setup.py name backends, nothing a draft algorithm.

config.py             the whole configuration (`MasterConfig`); conflicts.py: what must agree between its sections
grpo.py               the step loop
grpo_setup.py         builds what the loop needs from a valid configuration
draft_run.py          the step loop that trains a draft beside a frozen policy; draft_run_setup.py builds what it needs
run_setup.py          parts of both set-ups: clusters, engines, prompts, the probe, the summary
draft_export.py       the draft that a run leaves behind
advantages.py         group-relative advantages, reward scaling and shaping
loss.py               clipped policy-gradient loss
dynamic_sampling.py   DAPO's resampling of prompts without signal
validation.py         evaluation rounds
metrics.py            folds (numerator, denominator) pairs into numbers
"""
