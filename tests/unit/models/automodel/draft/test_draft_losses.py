"""Chunked soft cross-entropy: values and gradients in fp32 and bf16, edge logits, memory."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl.models.automodel.draft.losses import STATS, LossChunks, soft_distillation

ELEMENTS, WIDTH, TARGET, ROWS = 11, 6, 19, 7
IDS = torch.tensor([7, 2, 18, 0, 11])


def _case(dtype=torch.float32, ids=None):
    g = torch.Generator().manual_seed(0)
    size = TARGET if ids is None else len(ids)
    hidden = torch.randn(ELEMENTS, WIDTH, generator=g).to(dtype).requires_grad_()
    head = torch.randn(size, WIDTH, generator=g).to(dtype).requires_grad_()
    teacher = torch.randn(ROWS, TARGET, generator=g) * 3
    rows = torch.randint(ROWS, (ELEMENTS,), generator=g).sort().values
    weights = torch.rand(ELEMENTS, generator=g)
    labels = torch.randint(TARGET, (ELEMENTS,), generator=g)
    return hidden, head, teacher, rows, weights, labels


def _run(case, *, chunk, ids=None, drop=False):
    hidden, head, teacher, rows, weights, labels = case
    return soft_distillation(
        hidden,
        head,
        teacher,
        weights=weights,
        labels=labels,
        chunks=LossChunks.build(rows, chunk_size=chunk),
        vocab_ids=ids,
        drop_out_of_vocab=drop,
    )


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("ids", [None, IDS], ids=["full", "permuted"])
@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=["f32", "bf16"])
def test_loss_and_gradients_equal_autograd_in_float64(dtype, tolerance, chunk, ids, drop):
    case = _case(dtype, ids)
    out = _run(case, chunk=chunk, ids=ids, drop=drop)
    (out.loss * -2.5).backward()

    hidden, head, teacher, rows, weights, labels = case
    h, w = (x.detach().double().requires_grad_() for x in (hidden, head))
    columns = torch.arange(TARGET) if ids is None else ids
    z = teacher.double()[rows]
    target = z[:, columns].softmax(-1)
    log_q = (h @ w.T).log_softmax(-1)
    ce = -(target * log_q).sum(-1)
    inside = torch.isin(z.argmax(-1), columns)
    (((ce * weights * (inside if drop else 1)).sum()) * -2.5).backward()
    want = float((ce * weights * (inside if drop else 1)).sum())
    assert float(out.loss) == pytest.approx(want, rel=tolerance)
    torch.testing.assert_close(hidden.grad.double(), h.grad, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(head.grad.double(), w.grad, rtol=tolerance, atol=tolerance)
    assert hidden.grad.dtype == dtype
    assert head.grad.dtype == dtype

    p, q = z.softmax(-1)[:, columns], log_q.detach().exp()
    choice = columns[q.argmax(-1)]
    expected = {
        "cross_entropy": ce.detach(),
        "kl": (target * (target.log() - log_q.detach())).sum(-1),
        "top1": (choice == z.argmax(-1)).double(),
        "hit": (choice == labels).double(),
        "greedy": z.softmax(-1).gather(1, choice[:, None]).squeeze(1),
        "overlap": torch.minimum(p, q).sum(-1),
        "coverage": p.sum(-1),
        "argmax_in_vocab": inside.double(),
    }
    assert set(expected) == set(STATS)
    if dtype == torch.float32:
        for i, name in enumerate(STATS):
            torch.testing.assert_close(out.stats[:, i].double(), expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_columns_by_id_differ_from_columns_by_mask_on_a_permuted_map():
    """A reader that picks teacher columns with a boolean mask pairs them in another order than this map's."""
    case = _case(ids=IDS)
    by_id = _run(case, chunk=100, ids=IDS)
    by_mask = _run(case, chunk=100, ids=IDS.sort().values)
    assert abs(float(by_id.loss) - float(by_mask.loss)) > 0.1


def test_impossible_tokens_and_saturated_logits_stay_finite():
    case = list(_case())
    case[2][:, 3] = float("-inf")  # a padded vocabulary row
    case[2][0] = 0.0
    case[2][0, 5] = 1e4
    case[0].data *= 1e3
    out = _run(case, chunk=4)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(out.stats).all()
    assert torch.isfinite(case[0].grad).all()


def test_unused_teacher_rows_may_hold_nan():
    case = list(_case())
    want = float(_run(case, chunk=4).loss)
    unused = [r for r in range(ROWS) if r not in case[3].tolist()]
    assert unused
    case[2][unused] = float("nan")
    assert float(_run(case, chunk=4).loss) == want


class _WidestLogits(TorchDispatchMode):
    """Most rows of any tensor that is as wide as a vocabulary and is not the caller's own."""

    def __init__(self, width, given):
        super().__init__()
        self.width, self.rows, self.given = width, 0, given.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            is_wide = isinstance(t, torch.Tensor) and t.ndim >= 2 and t.shape[-1] == self.width
            if is_wide and t.untyped_storage().data_ptr() != self.given:
                self.rows = max(self.rows, t.numel() // self.width)
        return out


@pytest.mark.parametrize("chunk", [8, 16])
def test_logits_exist_for_one_chunk_at_a_time(chunk):
    n, vocab = 64, 37
    hidden = torch.randn(n, WIDTH, requires_grad=True)
    head = torch.randn(vocab, WIDTH, requires_grad=True)
    teacher = torch.randn(n, vocab)
    with _WidestLogits(vocab, teacher) as widest:
        out = soft_distillation(
            hidden,
            head,
            teacher,
            weights=torch.ones(n),
            labels=torch.zeros(n, dtype=torch.long),
            chunks=LossChunks.build(torch.arange(n), chunk_size=chunk),
            vocab_ids=None,
            drop_out_of_vocab=False,
        )
        out.loss.backward()
    assert widest.rows == chunk
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        soft_distillation(
            hidden,
            head,
            teacher,
            weights=torch.ones(n),
            labels=torch.zeros(n, dtype=torch.long),
            chunks=LossChunks.build(torch.arange(n), chunk_size=chunk),
            vocab_ids=None,
            drop_out_of_vocab=False,
        )
    assert not [t for t in saved if t.shape[-1] == vocab and t.shape[0] == n]


def test_shared_teacher_rows_are_read_once_per_chunk():
    chunks = LossChunks.build(torch.tensor([4, 4, 5, 5, 7]), chunk_size=3)
    assert chunks.bounds == ((0, 3, 0, 2), (3, 5, 2, 4))
    assert chunks.teacher_rows.tolist() == [4, 5, 5, 7]
    assert chunks.local_row.tolist() == [0, 0, 1, 0, 1]
