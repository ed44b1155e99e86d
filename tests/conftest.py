"""Environment of every test and of the processes it starts."""

from __future__ import annotations

import os

# Read while libraries are imported, so before the first test module. One OpenMP thread (numba's number becomes
# OpenMP's): several test files and the workers they start share the cores, and threads that outnumber the cores spin
# while they wait for each other.
for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(_name, _value)
