"""Print the table of draft algorithms, as docs/guides/draft-algorithms.md holds it; a test compares both.

.venv/bin/python tools/draft_table.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_rl.models.automodel.draft.architecture import EMBEDDING, HEAD, DraftArchitecture
from nemo_rl.models.automodel.draft.registry import DRAFT_ALGORITHMS, adapter_of, resolve_spec

POLICY = {
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
"""Sizes of Qwen3-4B."""


def trained(arch: DraftArchitecture) -> str:
    """Trained tensors, layers written once."""
    names = [re.sub(r"^(layers|fc_norm)\..*", r"\1.*", name) for name in arch.trained_shapes()]
    names = [re.sub(r"^(markov_head|confidence_head|prefix_gru|embed_proj)\..*", r"\1.*", name) for name in names]
    return ", ".join(f"`{name.removesuffix('.weight')}`" for name in dict.fromkeys(names))


def served(algo: str, arch: DraftArchitecture) -> str:
    """How the engine runs it, on CUDA and on CPU."""
    found: dict[str, list[str]] = {}
    for device in ("cuda", "cpu"):
        serving = adapter_of(algo).serving(arch, device=device)
        options = "".join(f" + `{key}`" for key in serving.options)
        own = " + extension" if serving.extension else ""
        found.setdefault(f"`{serving.method}`{options}{own}", []).append(device.upper())
    return "; ".join(how if len(devices) == 2 else f"{devices[0]}: {how}" for how, devices in found.items())


def row(algo: str) -> list[str]:
    """One line of the table."""
    config: type[Any] = DRAFT_ALGORITHMS[algo].config
    extra = {"mask_token_id": 151669} if "mask_token_id" in config.model_fields else {}
    extra |= {"block_size": 8} if "block_size" in config.model_fields else {}
    spec = resolve_spec(
        config(enabled=True, serve=False, **extra), policy_config=POLICY, k=None, max_model_len=4096, dtype="bfloat16"
    )
    arch = spec.architecture
    shared = [name for name in (EMBEDDING, HEAD) if name not in arch.trained_shapes()]
    features = "final state" if arch.reads_final_state else f"{len(arch.feature_ids)} layers"
    return [
        f"`{algo}`",
        features,
        str(arch.num_hidden_layers),
        trained(arch),
        ", ".join(f"`{name.removesuffix('.weight')}`" for name in shared) or "nothing",
        served(algo, arch),
        adapter_of(algo).k_rule,
    ]


def table() -> str:
    """The table in Markdown."""
    head = ["`algo`", "reads", "layers", "trained and sent", "the policy's", "served by vLLM as", "K"]
    rows = [head, ["---"] * len(head), *(row(algo) for algo in DRAFT_ALGORITHMS)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def main() -> None:
    """Print it."""
    print(table())


if __name__ == "__main__":
    main()
