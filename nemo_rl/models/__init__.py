"""Models: how they are trained (`policy`, on `automodel`) and how they generate (`generation`).

optim_config.py   schema of optimizers and schedules, shared by the policy and the draft
"""
