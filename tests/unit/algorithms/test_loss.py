"""The policy loss against a float64 loop written from the formulas, and its invariances."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_rl.algorithms.config import ClippedPGLossConfig
from nemo_rl.algorithms.loss import ClippedPGLossFn, kl_estimate
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

BATCH, LENGTH = 5, 9


def make_batch(seed: int = 0) -> tuple[torch.Tensor, BatchedDataDict]:
    g = torch.Generator().manual_seed(seed)
    draw = lambda scale: torch.randn(BATCH, LENGTH, generator=g) * scale - 1.5  # noqa: E731
    token_mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    for row, (start, end) in enumerate([(2, 9), (3, 4), (1, 6), (4, 4), (2, 8)]):
        token_mask[row, start:end] = True
    sample_mask = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    data = BatchedDataDict(
        {
            "token_mask": token_mask,
            "sample_mask": sample_mask,
            "advantages": torch.randn(BATCH, 1, generator=g).expand(BATCH, LENGTH) * token_mask,
            "prev_logprobs": draw(0.4),
            "generation_logprobs": draw(0.4),
            "reference_policy_logprobs": draw(0.4),
        }
    )
    return draw(0.4).requires_grad_(), data


def counts(data: BatchedDataDict) -> dict[str, torch.Tensor]:
    mask = data["token_mask"] & data["sample_mask"].bool()[:, None]
    return {"global_valid_toks": mask.sum(), "global_valid_seqs": data["sample_mask"].sum()}


def reference_loss(
    cfg: ClippedPGLossConfig, curr: torch.Tensor, data: BatchedDataDict
) -> tuple[float, list[list[float]]]:
    """Value and d(loss)/d(curr) in float64 by central differences of a scalar loop."""

    def value(logprobs: list[list[float]]) -> float:
        total, per_seq, tokens, seqs = 0.0, [], 0, 0
        for b in range(BATCH):
            if not data["sample_mask"][b]:
                continue
            seqs += 1
            idx = [t for t in range(LENGTH) if data["token_mask"][b, t]]
            prev = [float(data["prev_logprobs"][b, t]) for t in range(LENGTH)]
            if cfg.force_on_policy_ratio:
                prev = [float(curr[b, t]) for t in range(LENGTH)]
            seq_ratio = math.exp(sum(logprobs[b][t] - prev[t] for t in idx) / len(idx)) if idx else 1.0
            terms = []
            for t in idx:
                lp, gen = logprobs[b][t], float(data["generation_logprobs"][b, t])
                ratio = seq_ratio if cfg.sequence_level_importance_ratios else math.exp(lp - prev[t])
                clipped = min(max(ratio, 1 - cfg.ratio_clip_min), 1 + cfg.ratio_clip_max)
                adv = float(data["advantages"][b, t])
                pg = -min(ratio * adv, clipped * adv)
                if cfg.ratio_clip_c is not None and adv < 0:
                    pg = min(pg, -adv * cfg.ratio_clip_c)
                if cfg.use_importance_sampling_correction:
                    weight = math.exp(prev[t] - gen)
                    if cfg.truncated_importance_sampling_ratio is not None:
                        weight = min(weight, cfg.truncated_importance_sampling_ratio)
                    pg *= weight
                r = lp - float(data["reference_policy_logprobs"][b, t])
                kl = {"k1": r, "k2": r * r / 2, "k3": math.exp(-r) - 1 + r}[cfg.reference_policy_kl_type]
                if cfg.use_on_policy_kl_approximation:
                    kl *= math.exp(float(curr[b, t]) - gen)
                terms.append(pg + cfg.reference_policy_kl_penalty * kl)
            total += sum(terms)
            per_seq.append(sum(terms) / max(1, len(terms)))
            tokens += len(idx)
        return total / tokens if cfg.token_level_loss else sum(per_seq) / seqs

    base = [[float(curr[b, t]) for t in range(LENGTH)] for b in range(BATCH)]
    grad = [[0.0] * LENGTH for _ in range(BATCH)]
    eps = 1e-6
    for b in range(BATCH):
        for t in range(LENGTH):
            up = [list(row) for row in base]
            down = [list(row) for row in base]
            up[b][t] += eps
            down[b][t] -= eps
            grad[b][t] = (value(up) - value(down)) / (2 * eps)
    return value(base), grad


VARIANTS = {
    "grpo": {},
    "no_kl": {"reference_policy_kl_penalty": 0.0},
    "k1": {"reference_policy_kl_type": "k1", "reference_policy_kl_penalty": 0.3},
    "k2": {"reference_policy_kl_type": "k2", "reference_policy_kl_penalty": 0.3},
    "on_policy_kl": {"use_on_policy_kl_approximation": True, "reference_policy_kl_penalty": 0.3},
    "clip_higher": {"ratio_clip_max": 0.28},
    "dual_clip": {"ratio_clip_c": 1.5},
    "sequence_mean": {"token_level_loss": False},
    "gspo": {"sequence_level_importance_ratios": True, "token_level_loss": False},
    "importance": {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 1.2},
    "on_policy": {"force_on_policy_ratio": True},
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_value_and_gradient_match_a_float64_loop(overrides: dict[str, object]) -> None:
    cfg = ClippedPGLossConfig(**overrides)
    curr, data = make_batch()
    out = ClippedPGLossFn(cfg)(curr, data, **counts(data))
    out.loss.backward()
    value, grad = reference_loss(cfg, curr.detach().double(), data)
    assert float(out.loss) == pytest.approx(value, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(curr.grad.double(), torch.tensor(grad, dtype=torch.float64), rtol=1e-3, atol=1e-6)


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    curr, data = make_batch()
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig())
    whole = loss_fn(curr, data, **counts(data))
    parts = [loss_fn(curr[a:b], data.slice(a, b), **counts(data)) for a, b in [(0, 1), (1, 4), (4, 5)]]
    assert float(sum(p.loss for p in parts)) == pytest.approx(float(whole.loss), rel=1e-6)
    for name, (num, den) in whole.metrics.items():
        assert float(sum(p.metrics[name][0] for p in parts)) == pytest.approx(float(num), rel=1e-5), name
        assert float(sum(p.metrics[name][1] for p in parts)) == float(den), name


def test_masked_positions_may_hold_anything() -> None:
    curr, data = make_batch()
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig(use_importance_sampling_correction=True))
    clean = loss_fn(curr, data, **counts(data))
    clean.loss.backward()
    mask = data["token_mask"] & data["sample_mask"].bool()[:, None]
    dirty = BatchedDataDict(dict(data))
    for key in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "advantages"):
        dirty[key] = torch.where(mask, data[key], torch.full_like(data[key], float("nan")))
    again = torch.where(mask, curr.detach(), torch.full_like(curr, float("-inf"))).requires_grad_()
    out = loss_fn(again, dirty, **counts(data))
    out.loss.backward()
    assert float(out.loss) == float(clean.loss)
    assert torch.equal(torch.where(mask, again.grad, 0), torch.where(mask, curr.grad, 0))
    assert torch.isfinite(again.grad).all()


def test_nothing_kept_gives_a_zero_with_graph() -> None:
    curr, data = make_batch()
    data["sample_mask"] = torch.zeros(BATCH)
    out = ClippedPGLossFn(ClippedPGLossConfig())(curr, data, **counts(data))
    out.loss.backward()
    assert float(out.loss) == 0.0
    assert torch.equal(curr.grad, torch.zeros_like(curr))


def test_engine_error_metrics_are_at_rest_when_both_sides_agree() -> None:
    curr, data = make_batch()
    data["generation_logprobs"] = data["prev_logprobs"].clone()
    metrics = ClippedPGLossFn(ClippedPGLossConfig())(curr, data, **counts(data)).metrics
    ratio = lambda name: float(metrics[name][0] / metrics[name][1])  # noqa: E731
    assert ratio("token_mult_prob_error") == pytest.approx(1.0)
    assert ratio("gen_kl_error") == pytest.approx(0.0, abs=1e-7)
    data["generation_logprobs"] = data["prev_logprobs"] + 0.1
    metrics = ClippedPGLossFn(ClippedPGLossConfig())(curr, data, **counts(data)).metrics
    assert ratio("token_mult_prob_error") == pytest.approx(math.exp(0.1), rel=1e-5)


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
def test_kl_estimators_are_right_on_average(kl_type: str) -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.45, 0.3, 0.25])
    estimate = kl_estimate(p.log(), q.log(), kl_type=kl_type, input_clamp=None, output_clamp=None)
    exact = float((p * (p / q).log()).sum())
    # k1 and k3 are unbiased; k2 is right to second order in the difference.
    assert float((p * estimate).sum()) == pytest.approx(exact, rel=1e-4 if kl_type != "k2" else 0.1)


def test_kl_clamps_bound_the_estimate() -> None:
    wild = kl_estimate(torch.tensor([-60.0]), torch.tensor([0.0]), kl_type="k3", input_clamp=20.0, output_clamp=10.0)
    assert float(wild) == 10.0
