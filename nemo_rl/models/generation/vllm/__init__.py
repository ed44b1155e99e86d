"""The vLLM backend: a group of processes, each with one engine inside it.

Driver (no torch.distributed, no vllm)
    vllm_generation.py   the engines as one: deals prompts, updates all engines or none
    speculative.py       the user's speculative settings merged with the draft's
    engine_args.py       `policy.generation` -> arguments of the engine, and the lengths it allows
    spec_metrics.py      acceptance counters
In each worker process
    vllm_worker.py       one engine: sampling, weight version, checks, throughput probe
    sampling_check.py    the statistics behind the start-up check
    model_inspection.py  spares a process start per architecture
    draft_extension.py   calls what a draft brings along where vLLM cannot serve it by itself
Inside vLLM
    engine_worker.py, cpu_engine_worker.py, cuda_engine_worker.py   vLLM's worker classes with our additions
    weight_transfer.py   one update of policy and draft: checked before, applied at once, read back after
    update_checks.py     what is checked before
    readback.py          where a checkpoint tensor lives in the running model
    draft_ownership.py   which tensors the draft owns and which are the policy's
    cpu_linear.py        CPU engines compute with readable parameters
    cpu_sampler_fix.py   WORKAROUND for vLLM's CPU rejection sampler; states when to delete it
    cpu_norm_fix.py      WORKAROUND for vLLM's CPU norm of several layers at once; states when to delete it
    cpu_kernel_scan_fix.py   WORKAROUND for vLLM's scan for kernels, which fails beside numba; states when to delete it
"""
