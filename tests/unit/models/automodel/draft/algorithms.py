"""One small configuration per draft algorithm, for the tests that hold for all of them."""

from __future__ import annotations

from typing import Any

from nemo_rl.models.automodel.draft.registry import DRAFT_ALGORITHMS

K = 3
"""Tokens that each of these drafts proposes."""
MASK_TOKEN = 319
"""The last id of the tiny policies' vocabulary, which their tokenizer leaves unused."""

SETTINGS: dict[str, dict[str, Any]] = {
    "eagle1": {},
    "eagle3": {"ttt_steps": K, "aux_layer_indices": [0, 1, 2]},
    "peagle": {
        "num_depths": K,
        "num_layers": 2,
        "aux_layer_indices": [0, 1, 2],
        "mask_token_id": MASK_TOKEN,
        "down_sample_ratio": 1.0,
    },
    "dflash": {"block_size": K + 1, "num_layers": 2, "aux_layer_indices": [0, 2], "mask_token_id": MASK_TOKEN},
    "dspark": {
        "block_size": K,
        "num_layers": 2,
        "aux_layer_indices": [0, 2],
        "mask_token_id": MASK_TOKEN,
        "markov_rank": 16,
    },
    "domino": {
        "block_size": K,
        "num_layers": 2,
        "aux_layer_indices": [0, 2],
        "mask_token_id": MASK_TOKEN,
        "emb_dim": 16,
        "gru_hidden_dim": 24,
        # The first update of a new draft would leave the correction alone; every update has the same loss.
        "base_loss_weight": 0.5,
        "base_loss_steps": 10**9,
    },
}
"""Every candidate is drawn (full COD ratio, many anchors), so that the engine's walk can be replayed."""

ALGORITHMS = sorted(DRAFT_ALGORITHMS)


def config_for(algo: str, **changes: Any) -> Any:
    """`policy.draft` of an algorithm.

    Args:
        algo: name in the registry.
        changes: fields that differ from the small configuration.
    """
    return DRAFT_ALGORITHMS[algo].config(enabled=True, **SETTINGS[algo] | changes)
