"""Prompts: where questions come from, how they become token ids, in which order they are drawn; recorded rollouts.

config.py          schema of `data`
sources.py         questions: generated, from files, from Hugging Face data sets
tokenizer.py       the policy's tokenizer with the configured chat template
datasets.py        questions as prompts: template, chat template, token ids
loader.py          the order of prompts, which a resumed run continues exactly
rollout_store.py   rollouts on disk, written and read back; rollout_index.py is what lists them (no torch)
tiny_policy.py     settings and tokenizer of the policy that `tools/make_tiny_policy.py` makes
tiny_training.py   its supervised warm start
"""
