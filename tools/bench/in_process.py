"""What the benchmarks share: a recipe's configuration, a policy worker in this process, a synthetic batch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

# Read when vllm is imported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import MasterConfig
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.automodel.draft.spec import DraftSpec
    from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2
    from nemo_rl.utils.preflight import PreflightResult

DEMO = "examples/configs/recipes/llm/grpo-tiny-qwen3-1n0g-automodel-eagle3.yaml"


def load(config: str, overrides: list[str]) -> tuple[MasterConfig, PreflightResult]:
    """Load and check a recipe; output directories are not touched."""
    from nemo_rl.utils.config import build_master_config, load_config
    from nemo_rl.utils.preflight import preflight

    cfg = build_master_config(load_config(Path(config), ["checkpointing.enabled=false", *overrides]))
    return cfg, preflight(cfg)


def draft_of(checked: PreflightResult) -> DraftSpec:
    """The recipe's draft, which the benchmarks cannot do without."""
    if checked.draft_spec is None:
        sys.exit("--config: the recipe trains no draft; give one with policy.draft.enabled: true")
    return checked.draft_spec


def make_policy(cfg: MasterConfig, checked: PreflightResult, *, with_draft: bool) -> DTensorPolicyWorkerV2:
    """Build the policy worker as rank 0 of 1."""
    import torch.distributed as dist

    from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2

    worker = DTensorPolicyWorkerV2(
        cfg,
        draft_spec=checked.draft_spec if with_draft else None,
        draft_dir=checked.draft_dir if with_draft else None,
    )
    if not dist.is_initialized():
        worker.init_process_group(*worker.bind_rendezvous())
    worker.setup()
    return worker


def make_batch(cfg: MasterConfig, *, vocab_size: int, width: int, seed: int = 0) -> BatchedDataDict:
    """A training batch of random tokens: lengths spread from a third to the whole width, a third of each is prompt."""
    import torch

    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    g = torch.Generator().manual_seed(seed)
    n = cfg.policy.train_global_batch_size
    length = torch.randint(width // 3, width + 1, (n,), generator=g)
    columns = torch.arange(width)[None]
    is_token = columns < length[:, None]
    mask = is_token & (columns >= (length[:, None] // 3))
    logprobs = torch.randn(n, width, generator=g) * 0.1 - 2
    return BatchedDataDict(
        {
            "input_ids": torch.randint(0, vocab_size, (n, width), generator=g) * is_token,
            "input_lengths": length,
            "token_mask": mask,
            "sample_mask": torch.ones(n),
            "sample_index": torch.arange(n),
            "generation_logprobs": logprobs * mask,
            "prev_logprobs": logprobs * mask,
            "advantages": torch.randn(n, 1, generator=g) * mask,
        }
    )
