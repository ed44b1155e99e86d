"""States of a sharded policy on disk: which rank writes what, and that its logits come back bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import write_tiny_policy
from tests.unit.models.policy.scenarios import draft_spec_of, make_batch, make_config, record_and_replay

DRAFT = {"enabled": True, "aux_layer_indices": [0, 2], "ttt_steps": 3}
SPEC = {"vllm_kwargs": {"speculative_config": {"num_speculative_tokens": 3}}}
PACKED = {"enabled": True, "train_mb_tokens": 56, "logprob_mb_tokens": 56, "sequence_length_round": 8}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_policy(tmp_path_factory.mktemp("policy"), layers=4, heads=2, kv=2))


@pytest.mark.parametrize(
    ("world", "settings", "ranks_with_file"),
    [
        (1, {"precision": "bfloat16"}, [0]),
        (2, {"sequence_packing": PACKED}, [0, 1]),
        (2, {"dtensor_cfg": {"tensor_parallel_size": 2}}, [0]),
    ],
    ids=["bf16", "two-ranks-packed", "tensor-parallel"],
)
def test_logits_from_recorded_states_are_the_policys_own(
    pools: Any, model_dir: str, tmp_path: Path, world: int, settings: dict[str, Any], ranks_with_file: list[int]
) -> None:
    config = make_config(model_dir, draft=DRAFT, generation=SPEC, **settings)
    data = make_batch()
    results = pools[world].run(record_and_replay, config, data, str(tmp_path), spec=draft_spec_of(config))
    files = [rank for rank, result in enumerate(results) if result["report"].file is not None]
    assert files == ranks_with_file
    assert len(list(tmp_path.glob("*_features_*"))) == len(files)
    written = sorted(index for rank in files for index in results[rank]["report"].samples)
    # The last sample of each shard only filled it up.
    assert written == [i for i in range(8) if (i + 1) % (8 // len(files))]
    for result in results:
        assert sum(result["lengths"]) > 0
        assert all(result["is_equal"])
