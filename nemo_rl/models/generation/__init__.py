"""Generation of responses.

config.py       schema of `policy.generation`
interfaces.py   what the step loop and the refit may call
vllm/           the vLLM backend
"""
