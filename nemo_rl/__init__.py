"""NeMo-RL-style reinforcement learning whose speculative-decoding drafts are trained beside the policy.

One step, and where each part lives:

    rollouts with speculative decoding    experience/, models/generation/
    rewards                               environments/
    advantages, loss, the step loop       algorithms/
    policy and draft update               models/policy/, models/automodel/, models/automodel/draft/
    weights back to the engines           weight_sync/

Around it:

    the command                           cli.py, errors.py
    processes and batches                 distributed/
    prompts                               data/
    configuration, logs, checkpoints      utils/

Importing the package, or any `config` module in it, imports neither torch nor ray nor vllm.
"""
