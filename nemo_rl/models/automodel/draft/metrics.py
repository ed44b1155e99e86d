"""Metrics of a draft as (numerator, denominator) pairs, and the acceptance length that they predict. Needs no torch.

`_{j}` counts draft tokens from 1: `j` is the j-th token that the draft proposes. Sums run over supervised elements.

    loss                      the draft loss / 1
    loss_depth_{k}            soft cross-entropy at depth k = j - 1
    kl_{j}                    KL(policy || draft) over the draft's ids
    top1_{j}                  the draft's choice is the policy's most likely token
    hit_{j}                   the draft's choice is the sampled token
    accept_greedy_{j}         the policy's probability of the draft's choice
    accept_overlap_{j}        sum over tokens of min(policy, draft)
    prefix_hit_{j}            products over ordinals 1..j of top1,
    prefix_greedy_{j}           of accept_greedy,
    prefix_overlap_{j}          of accept_overlap; per chain that is supervised so far
    coverage                  the policy's mass on the draft's ids
    argmax_in_vocab           the policy's most likely token is a draft id
    documents_without_chain   documents with nothing to learn from
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["expected_acceptance_length"]

Variant = Literal["greedy", "overlap", "hit"]


def expected_acceptance_length(
    metrics: Mapping[str, tuple[Any, Any]], variant: Variant = "greedy", *, max_tokens: int | None = None
) -> float:
    """Tokens that one verification step of the engine emits, as the training batch predicts it.

    `1 + sum over j of P(the first j draft tokens are accepted)`; the 1 is the policy's own token, so the value compares
    with the engine's `1 + accepted / drafts`. Ratios are formed per j and then added: pooling the numerators would
    count chains that end with their document as rejections.

    Args:
        metrics: pairs summed over micro-batches and ranks.
        variant: `greedy` = the draft proposes its most likely token and the policy samples (the engine's default);
            `overlap` = the draft samples too; `hit` = both take their most likely token.
        max_tokens: tokens that the engine proposes; None = every depth that was trained.

    Returns:
        At least 1.0; ordinals without a single chain add nothing.
    """
    total, j = 1.0, 1
    while f"prefix_{variant}_{j}" in metrics and (max_tokens is None or j <= max_tokens):
        num, den = (float(x) for x in metrics[f"prefix_{variant}_{j}"])
        total += num / den if den else 0.0
        j += 1
    return total
