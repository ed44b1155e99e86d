"""Environments: what scores a response.

config.py                       schema of `env`
interfaces.py                   what the training loop may ask
registry.py                     name -> environment: the only dispatch
math_environment.py             mathematical answers; math_job.py and math_scoring.py are its scoring worker's part
reasoning_gym_environment.py    reasoning-gym answers; reasoning_gym_scoring.py is its scoring worker's part
scoring_pool.py                 processes that score under a time limit; scoring_worker.py is what runs in them
metrics.py                      what every environment reports

To add one, implement `interfaces.EnvironmentInterface`, give it a name and a section in `config.py` and a line in
`registry.py`.
"""
