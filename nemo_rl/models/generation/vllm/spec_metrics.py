"""Acceptance counters of speculative decoding.

One definition everywhere. A *draft* is one verification step of one request in which tokens had been proposed.
`acceptance_length` = 1 + accepted / drafts: the tokens one such step emits on average, the target's own token included,
in [1, K + 1]; 1.0 when nothing was accepted. The rate at position i (0-based) is the share of drafts whose tokens 0..i
were all accepted. Reading the per-position curve: all positions low - features, layer ids, head or norm of the draft;
position 0 fine and later ones near 0 - depths or positions of the draft are off; falling with context length - rotary
embedding or attention window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SpecCounters:
    """Cumulative counts; subtract two readings to get one interval, add those of several engines before dividing.

    Attributes:
        num_drafts: Verification steps of a request that had proposed tokens.
        num_draft_tokens: Proposed tokens.
        num_accepted_tokens: Proposed tokens that were accepted.
        accepted_per_pos: Entry i counts the drafts whose token i was accepted; length K, or 0 before the first draft.
        num_decode_tokens: Response tokens behind the first one, which the prefill gives.
        num_forwards: Steps of a request that gave them, with a proposal or without.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: tuple[int, ...] = ()
    num_decode_tokens: int = 0
    num_forwards: int = 0

    @classmethod
    def from_request(
        cls, accepted_per_step: Sequence[int], *, k: int, num_draft_tokens: int, num_response_tokens: int
    ) -> SpecCounters:
        """Counters of one finished request.

        The engine verifies whole drafts: its last step may accept tokens behind the one that ends the response and
        throw them away. They were not emitted, so they are not counted here. Then these counters equal those of a
        replay of the response in the trainer. Of a method that proposes in some steps only, the engine does not tell
        how many others there were; up to K thrown away tokens of a request may then be counted.

        Args:
            accepted_per_step: Accepted tokens of each step that had a draft, in order.
            k: Tokens proposed per step at most.
            num_draft_tokens: Proposed tokens of the request.
            num_response_tokens: Length of the response, the token of the prefill included.
        """
        steps = list(accepted_per_step)
        if steps:
            emitted_before = 1 + sum(steps[:-1]) + len(steps[:-1])
            steps[-1] = min(steps[-1], max(0, num_response_tokens - emitted_before))
        decoded = max(0, num_response_tokens - 1)
        return cls(
            num_drafts=len(steps),
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=sum(steps),
            accepted_per_pos=tuple(sum(step > i for step in steps) for i in range(k)),
            num_decode_tokens=decoded,
            # Each step adds a token of its own to those accepted; the last one's may have been thrown away.
            num_forwards=max(len(steps), decoded - sum(steps)),
        )

    def __add__(self, other: SpecCounters) -> SpecCounters:
        """Sum, e.g. over engines."""
        return self._combine(other, sign=1)

    def __sub__(self, earlier: SpecCounters) -> SpecCounters:
        """Counts since an earlier reading."""
        return self._combine(earlier, sign=-1)

    def _combine(self, other: SpecCounters, *, sign: int) -> SpecCounters:
        width = max(len(self.accepted_per_pos), len(other.accepted_per_pos))
        mine = self.accepted_per_pos + (0,) * (width - len(self.accepted_per_pos))
        theirs = other.accepted_per_pos + (0,) * (width - len(other.accepted_per_pos))
        return SpecCounters(
            num_drafts=self.num_drafts + sign * other.num_drafts,
            num_draft_tokens=self.num_draft_tokens + sign * other.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens + sign * other.num_accepted_tokens,
            accepted_per_pos=tuple(a + sign * b for a, b in zip(mine, theirs, strict=True)),
            num_decode_tokens=self.num_decode_tokens + sign * other.num_decode_tokens,
            num_forwards=self.num_forwards + sign * other.num_forwards,
        )

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verification step, 1 + accepted / drafts; 1.0 without drafts."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def tokens_per_forward(self) -> float:
        """Mean response tokens per decoding step, steps without a proposal included; 1.0 before the first.

        With a proposal in every step it is `acceptance_length` but for what the ends of responses cut off; of a method
        that finds one only now and then, this is the figure to compare.
        """
        return self.num_decode_tokens / self.num_forwards if self.num_forwards else 1.0

    @property
    def per_position_rates(self) -> tuple[float, ...]:
        """Share of drafts accepted up to and including each position; zeros without drafts."""
        return tuple(count / self.num_drafts if self.num_drafts else 0.0 for count in self.accepted_per_pos)
