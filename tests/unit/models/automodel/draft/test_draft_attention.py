"""Trunk-and-branch attention: every kernel against one dense softmax, values and gradients."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.models.automodel.draft import attention
from nemo_rl.models.automodel.draft.attention import TrunkLayout, trunk_branch_attention

TRUNK, HEADS, GROUPS, WIDTH = 13, 4, 2, 8
QUERY_ROWS = torch.tensor([2, 3, 4, 6, 9, 10])
FIRST_ROWS = torch.tensor([0, 0, 0, 0, 8, 8])
ORDER = torch.tensor([4, 0, 5, 2, 1, 3])


def _leaves(dtype, depth, count):
    g = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    q, k, v = draw(count, HEADS, WIDTH), draw(TRUNK, GROUPS, WIDTH), draw(TRUNK, GROUPS, WIDTH)
    branch = [draw(count, GROUPS, WIDTH) for _ in range(2 * depth)]
    grad = torch.randn(count, HEADS, WIDTH, generator=g, dtype=torch.float64).to(dtype)
    return [q, k, v, *branch], grad


def _dense(leaves, depth, count):
    q, k, v, *branch = (x.detach().double().requires_grad_() for x in leaves)
    rows = []
    for i in range(count):
        row, first = int(QUERY_ROWS[ORDER[i]]), int(FIRST_ROWS[ORDER[i]])
        keys = torch.cat([k[first : row + 1], *(b[i][None] for b in branch[:depth])])
        values = torch.cat([v[first : row + 1], *(b[i][None] for b in branch[depth:])])
        keys, values = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (keys, values))
        probs = (torch.einsum("hd,khd->hk", q[i], keys) * 0.3).softmax(-1)
        rows.append(torch.einsum("hk,khd->hd", probs, values))
    return [q, k, v, *branch], torch.stack(rows)


def _naive_flash_forward(q, k, v, layout, scale):
    """The contract of a packed flash kernel: offsets, causal from the bottom right, log-sum-exp [heads, total]."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for c in range(layout.num_segments):
        qs = slice(int(layout.query_offsets[c]), int(layout.query_offsets[c + 1]))
        ks = slice(int(layout.key_offsets[c]), int(layout.key_offsets[c + 1]))
        scores = _packed_scores(q[qs], k[ks], scale)
        lse[:, qs] = scores.logsumexp(-1)
        out[qs] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[ks].repeat_interleave(HEADS // GROUPS, 1))
    return out, lse, torch.zeros(2), torch.zeros(())


def _packed_scores(q, k, scale):
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(HEADS // GROUPS, 1)) * scale
    hidden = torch.arange(k.shape[0]) > torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    return scores.masked_fill(hidden, float("-inf"))


def _naive_flash_backward(grad, q, out, k, v, lse, state, layout, scale):
    """What the kernel computes from the output and log-sum-exp that it is handed."""
    assert len(state) == 2
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for c in range(layout.num_segments):
        qs = slice(int(layout.query_offsets[c]), int(layout.query_offsets[c + 1]))
        ks = slice(int(layout.key_offsets[c]), int(layout.key_offsets[c + 1]))
        probs = (_packed_scores(q[qs], k[ks], scale) - lse[:, qs, None]).exp()
        kr, vr = (x[ks].repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
        delta = (grad[qs] * out[qs]).sum(-1).T[:, :, None]
        ds = probs * (torch.einsum("qhd,khd->hqk", grad[qs], vr) - delta) * scale
        dq[qs] = torch.einsum("hqk,khd->qhd", ds, kr)
        dk[ks] += torch.einsum("hqk,qhd->khd", ds, q[qs]).unflatten(1, (GROUPS, -1)).sum(2)
        dv[ks] += torch.einsum("hqk,qhd->khd", probs, grad[qs]).unflatten(1, (GROUPS, -1)).sum(2)
    return dq, dk, dv


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("count", [6, 3], ids=["all_queries", "some_queries"])
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        *(
            (k, d)
            for k in ("cpu_flash", "plain", "plain_small_blocks")
            for d in (torch.float64, torch.float32, torch.bfloat16)
        ),
        ("packed", torch.float32),
    ],
    ids=lambda v: str(v).removeprefix("torch."),
)
def test_kernels_equal_one_dense_softmax(kernel, depth, count, dtype, monkeypatch):
    is_packed = kernel == "packed"
    if kernel.startswith("plain"):
        monkeypatch.setattr(attention, "_cpu_flash_forward", attention._plain_forward)
        monkeypatch.setattr(attention, "_cpu_flash_backward", attention._plain_backward)
        monkeypatch.setattr(attention, "_QUERY_BLOCK", 2 if kernel.endswith("blocks") else 256)
    elif is_packed:
        monkeypatch.setattr(attention, "_flash_forward", _naive_flash_forward)
        monkeypatch.setattr(attention, "_flash_backward", _naive_flash_backward)
    layout = TrunkLayout.build(QUERY_ROWS, FIRST_ROWS, is_packed=is_packed).select(ORDER)
    leaves, grad = _leaves(dtype, depth, count)
    k, v = layout.place_keys(leaves[1]), layout.place_keys(leaves[2])
    out = trunk_branch_attention(leaves[0], k, v, leaves[3 : 3 + depth], leaves[3 + depth :], layout=layout, scale=0.3)
    dense_leaves, dense = _dense(leaves, depth, count)
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-6, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(out.double(), dense, rtol=tolerance, atol=tolerance)
    got = torch.autograd.grad(out, leaves, grad)
    want = torch.autograd.grad(dense, dense_leaves, grad.double())
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=4 * tolerance, atol=4 * tolerance)


def test_segments_hold_each_documents_own_keys():
    layout = TrunkLayout.build(QUERY_ROWS, FIRST_ROWS, is_packed=True)
    keys = [
        layout.key_source[layout.key_offsets[c] : layout.key_offsets[c + 1]].tolist()
        for c in range(layout.num_segments)
    ]
    assert keys == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6], [8, 9, 10]]
    assert layout.query_offsets.tolist() == [0, 3, 4, 6]


def test_nothing_of_the_size_queries_times_trunk_is_kept_for_backward():
    rows = torch.arange(300)
    layout = TrunkLayout.build(rows, torch.zeros(300, dtype=torch.long), is_packed=False)
    q = torch.randn(300, HEADS, WIDTH, requires_grad=True)
    k = torch.randn(300, GROUPS, WIDTH, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        placed = layout.place_keys(k)
        trunk_branch_attention(q, placed, placed, [k], [k], layout=layout, scale=1.0)
    assert saved
    assert max(saved) <= 300 * HEADS * WIDTH
    assert layout.last_key.numel() == 300
