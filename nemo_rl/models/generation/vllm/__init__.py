"""The vLLM backend: a group of processes, each with one engine inside it."""
