"""Every export is served alike: the speculators layout and sharded weights propose what the plain native export does.

What the engine proposes from a plain native export equals the training forward, for every algorithm
(test_live_alignment.py). The same is asked here of the other exports, so all agree with each other, token for token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.models.automodel.draft import checkpoint
from nemo_rl.models.automodel.draft.registry import build_draft_runtime, resolve_spec
from tests.functional.serving.engine import MAX_LEN, ServedDraft, draw_weights  # sets the environment of vllm
from tests.functional.serving.test_live_alignment import agreement, make_prompts
from tests.tiny_models import write_tiny_policy
from tests.unit.models.automodel.draft.algorithms import K, config_for

pytestmark = pytest.mark.timeout(1200)

SHARD_BYTES = 60_000

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("speculators", {"norm_before_residual": True, "fc_norm": True, "norm_output": True}),
    "eagle3-alone": ("speculators", {"draft_vocab_size": 200}),
    "peagle": ("speculators", {"norm_before_residual": True, "norm_before_fc": True}),
    "dflash": ("speculators", {"draft_vocab_size": 200}),
    "dflash-native": ("native", {"draft_vocab_size": 200}),
    "dspark": ("speculators", {"block_size": K + 1, "sample_from_anchor": False}),
}
"""Every one is sharded; settings are those whose defaults differ between readers."""


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_tiny_policy(tmp_path_factory.mktemp("policy"), layers=4, heads=4, kv=2))


@pytest.fixture(scope="module")
def policy(policy_dir: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(policy_dir, attn_implementation="sdpa", dtype=torch.float32).eval()


def make_runtime(name: str, policy: torch.nn.Module, *, seed: int) -> Any:
    """A draft with random weights."""
    settings = CASES[name][1]
    cfg = config_for(name.split("-")[0], **settings)
    spec = resolve_spec(
        cfg,
        policy_config=policy.config.to_dict(),
        k=K,
        max_model_len=MAX_LEN,
        dtype="float32",
        device="cpu",
        vocab_ids=[i for i in range(300) if i % 3] if "draft_vocab_size" in settings else None,
    )
    runtime = build_draft_runtime(cfg, spec, policy_model=policy, device="cpu", dtype="float32", draft_dir=None, seed=0)
    draw_weights(runtime.module, seed=seed)
    return runtime


@pytest.mark.parametrize("name", CASES)
def test_the_engine_proposes_from_any_export_what_training_does(
    policy_dir: Path, policy: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(checkpoint.save_draft.__kwdefaults__, "max_shard_bytes", SHARD_BYTES)
    layout, draft_dir = CASES[name][0], tmp_path / "export"
    runtime, other = (make_runtime(name, policy, seed=seed) for seed in (5, 6))
    engine = ServedDraft(
        policy_dir,
        policy,
        runtime,
        draft_dir,
        new_tokens=16,
        layout=layout,
        is_self_describing=name.endswith("-alone"),
    )
    try:
        proposals = engine.proposals(make_prompts(3, seed=3))
    finally:
        engine.worker.shutdown()
    assert len(list(draft_dir.glob("model-*-of-*.safetensors"))) > 1
    config = json.loads((draft_dir / "config.json").read_text())
    assert ("speculators_config" in config) is (layout == "speculators")
    assert len(proposals) >= 15
    assert len({token for p in proposals for token in p.draft}) > 8, "a constant chain would hide an error"
    assert agreement(runtime, policy, proposals) == 1.0
    assert agreement(other, policy, proposals) < 0.2, "other weights must show"
