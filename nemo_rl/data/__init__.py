"""Prompts: where they come from (`datasets`) and how they become token ids and batches (`collate`).

config.py   schema of `data`
"""
