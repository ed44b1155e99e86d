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
    replayed_acceptance_{j}   the first j proposed tokens were accepted, replaying the engine along the responses
    replayed_acceptance_length
                              mean tokens per verification of that replay
    coverage                  the policy's mass on the draft's ids
    argmax_in_vocab           the policy's most likely token is a draft id
    documents_without_chain   documents with nothing to learn from
    anchors_used              blocks that a block draft trained on, per document
    label_in_vocab            the sampled token is a draft id, of block drafts of a reduced vocabulary: the others have
                              no cross-entropy with it

Of drafts with several terms, each weighed as in the loss: loss_{term}. Of drafts with a confidence head, c its value in
[0, 1], a what it should be:

    conf_abs_err_{j}          |c - a|
    conf_bias_{j}             c - a
    conf_brier_{j}            (c - a) squared
    conf_prefix_bias_{j}      product of c over ordinals 1..j minus that of a, per chain that is supervised so far
    conf_bin_{i}              c of the elements whose c lies in the i-th tenth, over their number
    conf_bin_target_{i}       a of the same elements, over their number

Of drafts that correct the logits of a plain block draft: base_{name} is {name} before the correction, lambda_base the
share of the loss on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "NUM_CONFIDENCE_BINS",
    "ReplayCounts",
    "expected_acceptance_length",
    "expected_calibration_error",
    "replay_drafting",
]

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


@dataclass(frozen=True)
class ReplayCounts:
    """What an engine that drafted along the recorded responses would have counted.

    Attributes:
        accepted: tokens accepted in each verification.
    """

    accepted: tuple[int, ...]

    @property
    def num_drafts(self) -> int:
        """Verifications."""
        return len(self.accepted)

    @property
    def num_accepted(self) -> int:
        """Accepted tokens."""
        return sum(self.accepted)

    def at_least(self, j: int) -> int:
        """Verifications that accepted the first j tokens."""
        return sum(count >= j for count in self.accepted)


def replay_drafting(rows: Iterable[Sequence[int]]) -> ReplayCounts:
    """Walk along responses as speculative decoding does: draft, accept, go on behind the token that follows.

    A greedy draft is accepted exactly when it is the token that was sampled: rejection sampling never emits a rejected
    token. So the recorded responses tell how many tokens the engine accepted from any place, and which places it
    drafted from. With the weights that generated the responses the counts are the engine's own.

    Worked example, one response, K = 3, `(place, accepted)` `[(4, 2), (5, 3), (6, 0), (7, 1), (8, 0), (9, 0)]`: drafts
    at 4 (2 accepted, next 7), 7 (1 accepted, next 9) and 9, so `accepted = (2, 1, 0)`.

    Args:
        rows: (place, tokens accepted there) of every place that the engine can draft from; places of one response are
            consecutive numbers, those of different responses are not.
    """
    accepted: list[int] = []
    previous = upcoming = None
    for place, count in sorted(tuple(row) for row in rows):
        if previous is None or place != previous + 1:
            upcoming = place
        if place == upcoming:
            accepted.append(count)
            upcoming = place + count + 1
        previous = place
    return ReplayCounts(tuple(accepted))


# -- confidence ------------------------------------------------------------------------------------------------------

NUM_CONFIDENCE_BINS = 10
"""Bins of the `conf_bin` metrics, of equal width."""


def expected_calibration_error(metrics: Mapping[str, tuple[Any, Any]]) -> float | None:
    """How far a confidence head is off on average: sum over bins of its share times |mean c - mean a|.

    Worked example, two bins in use, 3 elements with c = 0.2, 0.2, 0.3 and a = 0, 0, 1, 1 element with c = a = 0.9:
    `3 / 4 * |0.7 / 3 - 1 / 3| + 1 / 4 * 0 = 0.075`.

    Args:
        metrics: pairs summed over micro-batches and ranks.

    Returns:
        None when there is no confidence head, or nothing was measured.
    """
    total = gap = 0.0
    for i in range(NUM_CONFIDENCE_BINS):
        if f"conf_bin_{i}" in metrics:
            (predicted, count), (target, _) = metrics[f"conf_bin_{i}"], metrics[f"conf_bin_target_{i}"]
            gap += abs(float(predicted) - float(target))
            total += float(count)
    return gap / total if total else None
