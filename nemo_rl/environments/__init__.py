"""Environments: what scores a response.

To add one, implement `interfaces.EnvironmentInterface` and give it a name and a section in `config.py`.
"""
