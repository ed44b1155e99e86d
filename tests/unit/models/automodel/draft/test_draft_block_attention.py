"""Block attention: every kernel against one dense masked softmax in float64, values and gradients."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.models.automodel.draft import block_attention as module
from nemo_rl.models.automodel.draft.block_attention import BlockLayout, Tile, block_attention

HEADS, GROUPS, WIDTH, SLOTS = 4, 2, 8, 3
CONTEXT = 15
FIRST = torch.tensor([0, 0, 0, 7, 8, 8])
STOP = torch.tensor([1, 4, 7, 8, 8, 13])
"""Documents of 7, 1 and 7 context rows; a full context, one of one row, none at all, rows that nobody sees."""


def _leaves(dtype, blocks=6):
    g = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    leaves = [
        draw(blocks * SLOTS, HEADS, WIDTH),
        *(draw(CONTEXT, GROUPS, WIDTH) for _ in range(2)),
        *(draw(blocks * SLOTS, GROUPS, WIDTH) for _ in range(2)),
    ]
    return leaves, torch.randn(blocks * SLOTS, HEADS, WIDTH, generator=g, dtype=torch.float64).to(dtype)


def _dense(leaves, is_causal):
    q, k0, v0, k, v = (x.detach().double().requires_grad_() for x in leaves)
    seen = torch.zeros(q.shape[0], CONTEXT + k.shape[0], dtype=torch.bool)
    for b, (first, stop) in enumerate(zip(FIRST.tolist(), STOP.tolist(), strict=True)):
        for s in range(SLOTS):
            seen[b * SLOTS + s, first:stop] = True
            own = CONTEXT + b * SLOTS
            seen[b * SLOTS + s, own : own + (s + 1 if is_causal else SLOTS)] = True
    keys, values = (torch.cat(x).repeat_interleave(HEADS // GROUPS, 1) for x in ((k0, k), (v0, v)))
    scores = (torch.einsum("qhd,khd->hqk", q, keys) * 0.3).masked_fill(~seen, float("-inf"))
    return [q, k0, v0, k, v], torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def _use(kernel, monkeypatch):
    if kernel.startswith("plain"):
        monkeypatch.setattr(module, "_cpu_flash_forward", module._plain_forward)
        monkeypatch.setattr(module, "_cpu_flash_backward", module._plain_backward)
    if kernel.endswith("small_tiles"):
        monkeypatch.setattr(module, "_TILE_SCORES", 8)


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("kernel", ["flash", "plain", "flash_small_tiles", "plain_small_tiles"])
def test_kernels_equal_one_dense_softmax(kernel, dtype, is_causal, monkeypatch):
    _use(kernel, monkeypatch)
    layout = BlockLayout.build(FIRST, STOP, block_size=SLOTS)
    assert len(layout.tiles) == (5 if kernel.endswith("small_tiles") else 3)
    leaves, grad = _leaves(dtype)
    out = block_attention(*leaves, layout=layout, scale=0.3, is_causal=is_causal)
    dense_leaves, dense = _dense(leaves, is_causal)
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-6, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(out.double(), dense, rtol=tolerance, atol=tolerance)
    got = torch.autograd.grad(out, leaves, grad)
    want = torch.autograd.grad(dense, dense_leaves, grad.double())
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=4 * tolerance, atol=4 * tolerance)
    # Rows 13 and 14 lie behind the last anchor.
    assert not got[1][13:].any()


def test_worked_example():
    layout = BlockLayout.build(torch.tensor([0, 0, 5]), torch.tensor([2, 4, 6]), block_size=3)
    assert layout.tiles == (Tile(0, 6, 0, 4), Tile(6, 9, 5, 6))
    assert layout.stop_rows.tolist() == [2, 2, 2, 4, 4, 4, 6, 6, 6]


def test_no_blocks():
    leaves, grad = _leaves(torch.float32, blocks=0)
    layout = BlockLayout.build(FIRST[:0], STOP[:0], block_size=SLOTS)
    out = block_attention(*leaves, layout=layout, scale=1.0, is_causal=False)
    assert out.shape == (0, HEADS, WIDTH)
    assert all(not g.any() for g in torch.autograd.grad(out, leaves, grad))


def test_blocks_out_of_order_are_refused():
    with pytest.raises(AssertionError, match="ordered by their anchors"):
        BlockLayout.build(torch.tensor([0, 0]), torch.tensor([4, 2]), block_size=2)


@pytest.mark.parametrize("kernel", ["flash", "plain"])
def test_context_is_neither_repeated_nor_multiplied_by_the_queries(kernel, monkeypatch):
    """Kept for backward: the inputs, the output and the log-sum-exp; a layout without indices into the context."""
    _use(kernel, monkeypatch)
    rows, blocks, size = 400, 30, 4
    stops = torch.arange(blocks) * 10 + 100
    layout = BlockLayout.build(torch.zeros(blocks, dtype=torch.long), stops, block_size=size)
    q = torch.randn(blocks * size, HEADS, WIDTH, requires_grad=True)
    k0 = torch.randn(rows, GROUPS, WIDTH, requires_grad=True)
    k = torch.randn(blocks * size, GROUPS, WIDTH, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        block_attention(q, k0, k0, k, k, layout=layout, scale=1.0, is_causal=False)
    assert sorted(saved) == sorted([q.numel(), k0.numel(), k0.numel(), k.numel(), k.numel(), q.numel(), q.numel() // 8])
    assert layout.stop_rows.numel() == blocks * size


def test_tiles_bound_the_scores_and_skip_what_no_query_sees():
    """The last rows belong to late anchors: an early tile does not read them."""
    blocks, size = 64, 16
    stops = torch.arange(1, blocks + 1) * 4096
    layout = BlockLayout.build(torch.zeros(blocks, dtype=torch.long), stops, block_size=size)
    sizes = [(t.stop_query - t.first_query) * (t.stop_row - t.first_row) for t in layout.tiles]
    assert max(sizes) <= max(module._TILE_SCORES, size * int(stops[-1]))
    assert sum(sizes) < 0.6 * blocks * size * int(stops[-1])
    covered = [q for t in layout.tiles for q in range(t.first_query, t.stop_query)]
    assert covered == list(range(blocks * size))
