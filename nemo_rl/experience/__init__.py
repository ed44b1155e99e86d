"""Experience collection: :mod:`nemo_rl.experience.rollouts` turns prompts into scored completions."""
