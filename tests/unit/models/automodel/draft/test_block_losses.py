"""Terms of block drafts against autograd in float64: values, gradients, stats; chunks; labels without a draft id."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl.models.automodel.draft.block_losses import Correction, LossWeights, block_loss, confidence_loss
from nemo_rl.models.automodel.draft.losses import STATS, LossChunks

ELEMENTS, WIDTH, RANK, TARGET, ROWS = 13, 6, 4, 19, 8
IDS = torch.tensor([7, 2, 18, 0, 11, 5])
UPSTREAM = -2.5


def _case(dtype=torch.float32, ids=None):
    g = torch.Generator().manual_seed(0)
    size = TARGET if ids is None else len(ids)
    tensors = {
        "hidden": torch.randn(ELEMENTS, WIDTH, generator=g),
        "latent": torch.randn(ELEMENTS, RANK, generator=g),
        "weight": torch.randn(size, RANK, generator=g),
    }
    tensors["latent"][::3] = 0.0  # uncorrected elements
    rows = torch.randint(ROWS, (ELEMENTS,), generator=g).sort().values
    labels = torch.randint(TARGET, (ELEMENTS,), generator=g)
    labels[0], labels[1] = -1, 2
    return {n: t.to(dtype).requires_grad_() for n, t in tensors.items()} | {
        "head": torch.randn(size, WIDTH, generator=g).to(dtype),
        "teacher": torch.randn(ROWS, TARGET, generator=g) * 2,
        "rows": rows,
        "labels": labels,
        "weights": [torch.rand(ELEMENTS, generator=g) for _ in range(3)],
    }


def _run(c, *, chunk=4, ids=None, label="data", l1=True, base=True, correction=True):
    w = c["weights"]
    return block_loss(
        c["hidden"],
        c["head"],
        c["teacher"],
        weights=LossWeights(w[0], w[1] if l1 else None, w[2] if base else None),
        labels=c["labels"],
        chunks=LossChunks.build(c["rows"], chunk_size=chunk),
        vocab_ids=ids,
        label=label,
        correction=Correction(c["latent"], c["weight"]) if correction else None,
    )


def _oracle(c, *, ids=None, label="data", l1=True, base=True, correction=True):
    """One python loop over elements, everything in float64 and differentiable: (loss, inputs, terms)."""
    leaves = {n: c[n].detach().double().requires_grad_() for n in ("hidden", "latent", "weight")}
    columns = list(range(TARGET)) if ids is None else ids.tolist()
    weights = [w.double() for w in c["weights"]]
    total = sum(x.sum() * 0.0 for x in leaves.values())
    table = {name: [] for name in (*STATS, "l1", "base_cross_entropy", "base_top1")}
    for e in range(ELEMENTS):
        z = c["teacher"][c["rows"][e]].double()
        p = z.softmax(-1)
        kept = p[columns] / p[columns].sum()
        plain = c["head"].double() @ leaves["hidden"][e]
        full = plain + leaves["weight"] @ leaves["latent"][e] if correction else plain
        q = full.softmax(-1)
        spread = torch.zeros(TARGET, dtype=torch.float64).index_put((torch.tensor(columns),), q)
        wanted = int(z.argmax()) if label == "teacher_argmax" else int(c["labels"][e])
        ce = base_ce = torch.zeros((), dtype=torch.float64)
        if label == "soft":
            ce = -(kept * full.log_softmax(-1)).sum()
        elif wanted in columns:
            ce = -full.log_softmax(-1)[columns.index(wanted)]
            base_ce = -plain.log_softmax(-1)[columns.index(wanted)]
        distance = (spread - p).abs().sum()
        total = total + weights[0][e] * ce
        total = total + (weights[1][e] * distance if l1 else 0) + (weights[2][e] * base_ce if base else 0)
        best = columns[int(full.argmax())]
        values = {
            "cross_entropy": ce,
            "kl": (kept * (kept.log() - full.log_softmax(-1))).sum(),
            "top1": float(best == int(z.argmax())),
            "hit": float(best == int(c["labels"][e])),
            "greedy": p[best],
            "overlap": torch.minimum(spread, p).sum(),
            "coverage": p[columns].sum(),
            "argmax_in_vocab": float(int(z.argmax()) in columns),
            "l1": distance,
            "base_cross_entropy": base_ce,
            "base_top1": float(columns[int(plain.argmax())] == int(z.argmax())),
        }
        for name, value in values.items():
            table[name].append(float(value.detach()) if isinstance(value, torch.Tensor) else value)
    return total, leaves, {n: torch.tensor(v, dtype=torch.float64) for n, v in table.items()}


@pytest.mark.parametrize("label", ["data", "teacher_argmax"])
@pytest.mark.parametrize("ids", [None, IDS], ids=["full", "permuted"])
@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)], ids=["f32", "bf16"])
def test_all_terms_equal_autograd_in_float64(dtype, tolerance, chunk, ids, label):
    c = _case(dtype, ids)
    out = _run(c, chunk=chunk, ids=ids, label=label)
    (out.loss * UPSTREAM).backward()
    want, leaves, table = _oracle(c, ids=ids, label=label)
    (want * UPSTREAM).backward()
    assert float(out.loss) == pytest.approx(float(want.detach()), rel=tolerance)
    for name, leaf in leaves.items():
        assert c[name].grad.dtype == dtype
        assert leaf.grad.abs().max() > 0.1, name
        scale = float(leaf.grad.abs().max())
        torch.testing.assert_close(
            c[name].grad.double() / scale,
            leaf.grad / scale,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: n + m,
        )
    if dtype == torch.float32:
        got = {n: out.stats[:, i] for i, n in enumerate(STATS)} | out.extra
        assert got.keys() == table.keys()
        for name, column in table.items():
            torch.testing.assert_close(got[name].double(), column, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)
        torch.testing.assert_close(1 - 0.5 * out.extra["l1"], got["overlap"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("correction", [True, False])
@pytest.mark.parametrize("ids", [None, IDS], ids=["full", "permuted"])
@pytest.mark.parametrize(
    "options", [{"label": "soft", "l1": True}, {"label": "soft", "l1": False}, {"l1": False}], ids=str
)
def test_each_combination_of_terms(options, ids, correction):
    c = _case(ids=ids)
    options = options | {"ids": ids, "base": False, "correction": correction}
    out = _run(c, **options)
    out.loss.backward()
    want, leaves, _ = _oracle(c, **options)
    want.backward()
    assert float(out.loss) == pytest.approx(float(want.detach()), rel=1e-5)
    assert set(out.extra) == ({"l1"} if options["l1"] else set())
    for name in ("hidden", "latent", "weight") if correction else ("hidden",):
        torch.testing.assert_close(c[name].grad.double(), leaves[name].grad, rtol=1e-5, atol=1e-6)


def test_fp64_inputs_pass_gradcheck():
    c = _case(torch.float64)

    def f(hidden, latent, weight):
        return _run(c | {"hidden": hidden, "latent": latent, "weight": weight}).loss

    assert torch.autograd.gradcheck(f, [c[n] for n in ("hidden", "latent", "weight")], atol=1e-6, fast_mode=True)


def test_a_label_that_is_no_draft_id_has_no_cross_entropy_and_no_gradient():
    c = _case(ids=IDS)
    outside = next(v for v in range(TARGET) if v not in IDS.tolist())
    c["labels"][:] = outside
    out = _run(c, ids=IDS, l1=False)
    out.loss.backward()
    assert float(out.loss) == 0.0
    assert all(bool((c[n].grad == 0).all()) for n in ("hidden", "latent", "weight"))
    assert bool((out.stats[:, STATS.index("hit")] == 0).all())


def test_columns_by_id_differ_from_columns_by_mask_on_a_permuted_map():
    """A reader that picks teacher columns with a boolean mask pairs them in another order than this map's."""
    c = _case(ids=IDS)
    assert abs(float(_run(c, ids=IDS).loss) - float(_run(c, ids=IDS.sort().values).loss)) > 0.1


def test_a_perfect_draft_has_no_distance_and_full_acceptance():
    c = _case()
    c["head"] = torch.eye(TARGET)
    c["hidden"] = c["teacher"][c["rows"]].clone().requires_grad_()
    out = _run(c, correction=False, base=False)
    torch.testing.assert_close(out.extra["l1"], torch.zeros(ELEMENTS), atol=1e-6, rtol=0)
    torch.testing.assert_close(out.stats[:, STATS.index("overlap")], torch.ones(ELEMENTS))


def test_impossible_tokens_and_saturated_logits_stay_finite():
    c = _case()
    c["teacher"][:, 3] = float("-inf")  # a padded vocabulary row
    c["teacher"][0] = 0.0
    c["teacher"][0, 5] = 1e4
    c["labels"] = c["labels"].where(c["labels"] != 3, 4)
    c["hidden"].data *= 1e3
    out = _run(c)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(out.stats).all()
    assert all(torch.isfinite(c[n].grad).all() for n in ("hidden", "latent", "weight"))


def test_unused_teacher_rows_may_hold_nan():
    c = _case()
    want = float(_run(c).loss)
    unused = [r for r in range(ROWS) if r not in c["rows"].tolist()]
    assert unused
    c["teacher"][unused] = float("nan")
    assert float(_run(c).loss) == want


def test_uncorrected_logits_have_no_soft_labels():
    with pytest.raises(ValueError, match="soft"):
        _run(_case(), label="soft")


class _WidestLogits(TorchDispatchMode):
    """Most rows of any tensor that is as wide as a vocabulary and is not the caller's own."""

    def __init__(self, width, given):
        super().__init__()
        self.width, self.rows = width, 0
        self.given = {t.untyped_storage().data_ptr() for t in given}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            is_wide = isinstance(t, torch.Tensor) and t.ndim >= 2 and t.shape[-1] == self.width
            if is_wide and t.untyped_storage().data_ptr() not in self.given:
                self.rows = max(self.rows, t.numel() // self.width)
        return out


def test_logits_exist_for_one_chunk_at_a_time_and_none_are_kept():
    n, vocab, chunk = 64, 37, 8
    hidden = torch.randn(n, WIDTH, requires_grad=True)
    latent, weight = torch.randn(n, RANK, requires_grad=True), torch.randn(vocab, RANK, requires_grad=True)
    teacher = torch.randn(n, vocab)
    ones = torch.ones(n)
    head = torch.randn(vocab, WIDTH)
    saved = []
    with (
        _WidestLogits(vocab, [teacher]) as widest,
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        block_loss(
            hidden,
            head,
            teacher,
            weights=LossWeights(ones, ones, ones),
            labels=torch.zeros(n, dtype=torch.long),
            chunks=LossChunks.build(torch.arange(n), chunk_size=chunk),
            vocab_ids=None,
            correction=Correction(latent, weight),
        ).loss.backward()
    assert widest.rows == chunk
    assert saved
    assert not [t for t in saved if t.shape[-1] == vocab]


def test_confidence_loss_equals_autograd_and_clamps_the_target():
    g = torch.Generator().manual_seed(3)
    logits = (torch.randn(7, generator=g) * 4).requires_grad_()
    target = torch.rand(7, generator=g)
    target[0], target[1] = -0.1, 1.1
    weights = torch.rand(7, generator=g)
    loss, terms = confidence_loss(logits, target, weights=weights)
    (loss * UPSTREAM).backward()
    x, t = logits.detach().double().requires_grad_(), target.double().clamp(0, 1)
    want = -(t * F.logsigmoid(x) + (1 - t) * F.logsigmoid(-x))
    ((want * weights.double()).sum() * UPSTREAM).backward()
    torch.testing.assert_close(terms.double(), want.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.grad.double(), x.grad, rtol=1e-5, atol=1e-6)
    assert not terms.requires_grad
    assert confidence_loss(logits.detach().bfloat16(), target, weights=weights)[0].dtype == torch.float32
