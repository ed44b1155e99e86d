"""Clipped policy-gradient loss: a pure function of log-probabilities and a batch.

Every token quantity is ``[B, T]`` with the convention of the whole program: entry ``t`` belongs to token ``x_t`` and
its log-probability is ``log p(x_t | x_<t)``; position 0 and padding are masked. Denominators are global and come from
the caller, so the sum of the losses of all micro-batches and ranks is the loss of the whole optimizer batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import ClippedPGLossConfig
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

KLType = Literal["k1", "k2", "k3"]


class LossOutput(NamedTuple):
    """What a loss function returns for one micro-batch."""

    loss: Tensor
    """Scalar with graph, already divided by the global denominators."""
    metrics: dict[str, tuple[Tensor, Tensor]]
    """``name -> (numerator, denominator)``, detached fp32 scalars; add both over micro-batches and ranks, then
    divide."""


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum the entries that a mask keeps; what it drops may be NaN or infinite.

    Args:
        values: float [..., T].
        mask: bool, broadcastable to ``values``; True = keep.

    Returns:
        Scalar float; its gradient is exactly zero at dropped entries.
    """
    return torch.where(mask, values, torch.zeros_like(values)).sum()


def kl_estimate(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    *,
    kl_type: KLType,
    input_clamp: float | None,
    output_clamp: float | None,
) -> Tensor:
    """Per-token estimate of ``KL(policy || reference)`` from samples of the policy.

    The three estimators of J. Schulman, "Approximating KL divergence" (2020), with ``r = log p - log p_ref``:
    k1 = r (unbiased, can be negative), k2 = r^2 / 2 (low variance), k3 = exp(-r) - 1 + r (unbiased and non-negative).

    Args:
        logprobs: float [B, T], the policy's log-probability of each sampled token.
        reference_logprobs: float [B, T], the reference policy's.
        kl_type: the estimator.
        input_clamp: bound on ``|r|`` before the exponential; None = no bound.
        output_clamp: bound on the absolute estimate; None = no bound.

    Returns:
        float [B, T].
    """
    ratio = logprobs - reference_logprobs
    if input_clamp is not None:
        ratio = ratio.clamp(-input_clamp, input_clamp)
    if kl_type == "k1":
        estimate = ratio
    elif kl_type == "k2":
        estimate = ratio.square() / 2
    else:
        estimate = torch.exp(-ratio) - 1 + ratio
    return estimate if output_clamp is None else estimate.clamp(-output_clamp, output_clamp)


@dataclass(frozen=True)
class ClippedPGLossFn:
    """PPO/GRPO/DAPO/GSPO policy loss with an optional KL penalty to a reference policy.

    ``-min(r A, clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max) A)``, bounded by ``-ratio_clip_c A`` where ``A < 0``
    (dual clip), averaged over tokens (``token_level_loss``) or first inside each sequence. ``r`` is the ratio of
    current to rollout-time policy per token, or its geometric mean over the sequence
    (``sequence_level_importance_ratios``).
    """

    cfg: ClippedPGLossConfig

    def __call__(
        self, curr_logprobs: Tensor, data: BatchedDataDict, *, global_valid_toks: Tensor, global_valid_seqs: Tensor
    ) -> LossOutput:
        """Compute the loss of one micro-batch.

        Args:
            curr_logprobs: fp32 [B, T] with graph, log-probabilities of the sampled tokens under the trained policy at
                the sampling temperature.
            data: keys ``advantages``, ``generation_logprobs`` fp32 [B, T], ``token_mask`` [B, T], ``sample_mask`` [B];
                ``prev_logprobs`` unless ``force_on_policy_ratio``; ``reference_policy_logprobs`` when a KL penalty is
                set.
            global_valid_toks: scalar, kept tokens of the whole optimizer batch over all ranks.
            global_valid_seqs: scalar, kept sequences of the same.

        Returns:
            The loss and its metrics. A batch without kept tokens gives a zero that still reaches ``curr_logprobs``.
        """
        cfg = self.cfg
        mask = data["token_mask"].bool() & data["sample_mask"].bool()[:, None]
        # What the mask drops may hold anything, so it is zeroed before any exponential.
        curr = torch.where(mask, curr_logprobs, torch.zeros_like(curr_logprobs))
        keep = lambda key: torch.where(mask, data[key].to(curr.dtype), torch.zeros_like(curr))  # noqa: E731
        advantages, gen = keep("advantages"), keep("generation_logprobs")
        prev = curr.detach() if cfg.force_on_policy_ratio else keep("prev_logprobs")

        log_ratio = curr - prev
        if cfg.sequence_level_importance_ratios:
            lengths = mask.sum(-1, keepdim=True).clamp(min=1)
            log_ratio = torch.where(mask, log_ratio, 0).sum(-1, keepdim=True).div(lengths).expand_as(curr)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1.0 - cfg.ratio_clip_min, 1.0 + cfg.ratio_clip_max)
        pg = torch.maximum(-advantages * ratio, -advantages * clipped)
        if cfg.ratio_clip_c is not None:
            pg = torch.where(advantages < 0, torch.minimum(pg, -advantages * cfg.ratio_clip_c), pg)

        # Rollouts come from the engine, gradients from the trainer: exp(prev - gen) is the ratio of the two samplers.
        if cfg.use_importance_sampling_correction:
            weights = (prev - gen).exp().detach()
            if cfg.truncated_importance_sampling_ratio is not None:
                weights = weights.clamp(max=cfg.truncated_importance_sampling_ratio)
        else:
            weights = torch.ones_like(prev)
        pg = pg * weights

        kl = torch.zeros_like(curr)
        if cfg.reference_policy_kl_penalty != 0:
            kl = kl_estimate(
                curr,
                keep("reference_policy_logprobs"),
                kl_type=cfg.reference_policy_kl_type,
                input_clamp=cfg.kl_input_clamp_value,
                output_clamp=cfg.kl_output_clamp_value,
            )
            if cfg.use_on_policy_kl_approximation:
                kl = kl * (curr - gen).exp().detach()
        total = pg + cfg.reference_policy_kl_penalty * kl

        if cfg.token_level_loss:
            loss = masked_sum(total, mask) / global_valid_toks.clamp(min=1)
        else:
            lengths = mask.sum(-1)
            per_sequence = torch.where(mask, total, 0).sum(-1) / lengths.clamp(min=1)
            loss = per_sequence.sum() / global_valid_seqs.clamp(min=1)
        return LossOutput(loss, self._metrics(mask, curr, prev, gen, ratio, clipped, advantages, pg, kl))

    @torch.no_grad()
    def _metrics(
        self,
        mask: Tensor,
        curr: Tensor,
        prev: Tensor,
        gen: Tensor,
        ratio: Tensor,
        clipped: Tensor,
        advantages: Tensor,
        pg: Tensor,
        kl: Tensor,
    ) -> dict[str, tuple[Tensor, Tensor]]:
        tokens = mask.sum().float()
        gap = (prev - gen).abs()
        # A position is clipped when the clip decides the loss, whichever side of 1 the ratio is on.
        is_clipped = (ratio != clipped) & (-advantages * clipped >= -advantages * ratio)
        pair = lambda values: (masked_sum(values.float(), mask), tokens)  # noqa: E731
        return {
            "pg_loss": pair(pg),
            "kl_penalty": pair(kl),
            "probs_ratio": pair(ratio),
            "probs_ratio_clamped": pair(clipped),
            "clip_fraction": pair(is_clipped),
            # exp(|trainer - engine|): 1.0 when both agree on every token; the on-policy check of the step.
            "token_mult_prob_error": pair(gap.exp()),
            "gen_kl_error": pair(kl_estimate(gen, prev, kl_type="k3", input_clamp=None, output_clamp=None)),
            "sampling_importance_ratio": pair((prev - gen).exp()),
            "approx_entropy": pair(-(curr - gen).exp() * curr),
            "advantages_abs": pair(advantages.abs()),
        }
