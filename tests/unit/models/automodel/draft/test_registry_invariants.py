"""What holds for every draft algorithm, through the seam alone: a real policy's forward, plan, loss, publish."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.automodel.draft.registry import build_draft_runtime, resolve_spec
from tests.unit.models.automodel.draft.algorithms import ALGORITHMS, K, config_for
from tests.unit.models.automodel.draft.helpers import to_microbatch
from tests.unit.models.automodel.draft.scenarios import draft_step, make_batch, policy_gradients

pytestmark = pytest.mark.parametrize("algo", ALGORITHMS)
VOCAB = 320


@pytest.fixture(scope="module")
def policy(draft_policy_dir: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(draft_policy_dir, attn_implementation="sdpa").eval()


def make_runtime(algo: str, policy: torch.nn.Module, *, draft_dir: str | None = None, **changes: Any) -> Any:
    dtype = changes.pop("dtype", "float32")
    cfg = config_for(algo, model_name=draft_dir, **changes)
    spec = resolve_spec(cfg, policy_config=policy.config.to_dict(), k=K, max_model_len=64, dtype=dtype)
    return build_draft_runtime(cfg, spec, policy_model=policy, device="cpu", dtype=dtype, draft_dir=draft_dir, seed=1)


def one_step(
    runtime: Any,
    policy: torch.nn.Module,
    batch: BatchedDataDict,
    groups: Sequence[Sequence[int]],
    *,
    mode: str = "fixed",
    multiple: int = 1,
    spoil: Any = None,
) -> tuple[float, dict[str, torch.Tensor], dict[str, tuple[float, float]]]:
    """Loss, gradients and metric pairs of one update over micro-batches of sample indices."""
    runtime.module.zero_grad(set_to_none=True)
    runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=policy)
    loss, sums = 0.0, {}
    for group in groups:
        mb = to_microbatch(batch, group, mode=mode, multiple=multiple)
        with torch.no_grad(), runtime.capture(policy):
            logits = policy(input_ids=mb.input_ids, position_ids=mb.position_ids, use_cache=False).logits
        if spoil is not None:
            spoil(runtime, mb, logits)
        out = runtime.loss(mb, logits)
        out.loss.backward()
        loss += float(out.loss.detach())
        for name, (num, den) in out.metrics.items():
            old = sums.get(name, (0.0, 0.0))
            sums[name] = (old[0] + float(num), old[1] + float(den))
    return loss, {n: p.grad.clone() for n, p in runtime.module.named_parameters() if p.grad is not None}, sums


def assert_same(got: Any, want: Any) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    for name, grad in want[1].items():
        torch.testing.assert_close(got[1][name], grad, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert got[2].keys() == want[2].keys()
    for name, pair in want[2].items():
        assert got[2][name] == pytest.approx(pair, rel=1e-4, abs=1e-4), name


def test_split_and_packing_do_not_matter(algo: str, policy: torch.nn.Module) -> None:
    runtime, batch = make_runtime(algo, policy), make_batch()
    everyone = list(range(batch.size))
    want = one_step(runtime, policy, batch, [everyone])
    assert want[0] > 0.1
    assert all(float(g.abs().max()) > 0 for n, g in want[1].items() if "lm_head" not in n), "a dead parameter"
    for groups, options in (
        ([[i] for i in everyone], {}),
        ([everyone[:3], everyone[3:]], {"multiple": 8}),
        ([everyone], {"mode": "packed"}),
        ([everyone[4:], everyone[:4]], {"mode": "packed", "multiple": 16}),
    ):
        assert_same(one_step(runtime, policy, batch, groups, **options), want)
    chunked = make_runtime(algo, policy, loss_chunk_size=5)
    assert_same(one_step(chunked, policy, batch, [everyone]), want)


def test_one_rank_or_two(algo: str, draft_pools: Any, draft_policy_dir: str) -> None:
    want = draft_pools[1].run(draft_step, draft_policy_dir, algo=algo, shard=False, micro_batch=8)[0]
    for options in ({}, {"packed": True, "micro_batch": 4}):
        for got in draft_pools[2].run(draft_step, draft_policy_dir, algo=algo, **options):
            assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
            for name, grad in want["grads"].items():
                torch.testing.assert_close(got["grads"][name], grad, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: n + m)
            for name, pair in want["metrics"].items():
                assert got["metrics"][name] == pytest.approx(pair, rel=1e-4, abs=1e-4), name
            for name, tensor in want["published"].items():
                torch.testing.assert_close(got["published"][name], tensor, rtol=1e-4, atol=1e-6)


def test_a_rank_without_supervised_tokens_changes_nothing(algo: str, draft_pools: Any, draft_policy_dir: str) -> None:
    want = draft_pools[1].run(draft_step, draft_policy_dir, algo=algo, masked=(4, 5, 6, 7), shard=False)[0]
    for got in draft_pools[2].run(draft_step, draft_policy_dir, algo=algo, masked=(4, 5, 6, 7)):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
        for name, grad in want["grads"].items():
            torch.testing.assert_close(got["grads"][name], grad, rtol=2e-4, atol=2e-6)


def test_the_policys_gradients_are_bit_identical(algo: str, draft_policy_dir: str) -> None:
    want = policy_gradients(draft_policy_dir, with_draft=False)
    got = policy_gradients(draft_policy_dir, with_draft=True, algo=algo)
    assert all(torch.equal(got[name], grad) for name, grad in want.items())
    alone = policy_gradients(draft_policy_dir, with_draft=True, policy_loss=False, algo=algo)
    assert all(grad is None for grad in alone.values()), "the draft reaches into the policy"


def test_documents_of_a_row_do_not_see_each_other(algo: str, policy: torch.nn.Module) -> None:
    """Features, logits and tokens of one document are changed; what the other contributes is not."""

    def share(spoil: Any) -> tuple[float, dict[str, torch.Tensor]]:
        batch = make_batch()
        batch["sample_mask"][:] = 0
        batch["sample_mask"][2] = 1
        loss, grads, _ = one_step(make_runtime(algo, policy), policy, batch, [[1, 2, 4]], mode="packed", spoil=spoil)
        return loss, grads

    def change_neighbours(runtime: Any, mb: Any, logits: torch.Tensor) -> None:
        other = mb.doc_ids != 1
        for state in runtime._capture._captured.values():
            state[other] = 7.0
        logits[other] = -3.0
        mb.input_ids[other] = 5

    want = share(None)
    got = share(change_neighbours)
    assert want[0] > 0.1
    assert got[0] == pytest.approx(want[0], rel=1e-6)
    for name, grad in want[1].items():
        torch.testing.assert_close(got[1][name], grad, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_padding_may_hold_anything(algo: str, policy: torch.nn.Module) -> None:
    batch = make_batch()
    everyone = list(range(batch.size))

    def poison(runtime: Any, mb: Any, logits: torch.Tensor) -> None:
        for state in runtime._capture._captured.values():
            state[mb.doc_ids < 0] = float("nan")
        logits[mb.doc_ids < 0] = float("nan")

    want = one_step(make_runtime(algo, policy), policy, batch, [everyone])
    got = one_step(make_runtime(algo, policy), policy, batch, [everyone], spoil=poison)
    assert_same(got, want)


def short_batch(lengths: Sequence[int], responses: Sequence[int]) -> BatchedDataDict:
    width = max(lengths)
    place = torch.arange(width)[None]
    length, response = torch.tensor(lengths)[:, None], torch.tensor(responses)[:, None]
    return BatchedDataDict(
        {
            "input_ids": torch.randint(VOCAB, (len(lengths), width), generator=torch.Generator().manual_seed(0)),
            "input_lengths": torch.tensor(lengths),
            "token_mask": ((place >= length - response) & (place < length)).float(),
            "sample_mask": torch.ones(len(lengths)),
            "sample_index": torch.arange(len(lengths)),
        }
    )


@pytest.mark.parametrize(
    ("lengths", "responses"),
    [((5,), (0,)), ((5,), (1,)), ((1,), (1,)), ((1, 4), (0, 1)), ((2,), (1,))],
    ids=["none", "one", "single", "mixed", "position1"],
)
def test_nothing_to_learn_is_a_finite_zero_for_every_parameter(
    algo: str, policy: torch.nn.Module, lengths: Sequence[int], responses: Sequence[int]
) -> None:
    runtime, batch = make_runtime(algo, policy), short_batch(lengths, responses)
    loss, grads, metrics = one_step(runtime, policy, batch, [list(range(len(lengths)))])
    assert loss == 0.0
    assert grads.keys() == {n for n, p in runtime.module.named_parameters() if p.requires_grad}
    assert all(float(g.abs().max()) == 0.0 for g in grads.values())
    assert all(num == num for num, _ in metrics.values())


def test_the_shortest_supervised_chain_learns(algo: str, policy: torch.nn.Module) -> None:
    """Two response tokens: the draft starts at the first and predicts the second; also right at position 0."""
    for lengths, responses in (((5,), (2,)), ((3,), (2,))):
        loss, grads, _ = one_step(make_runtime(algo, policy), policy, short_batch(lengths, responses), [[0]])
        assert loss > 0.0
        assert all(bool(g.isfinite().all()) for g in grads.values())


def test_an_all_padding_row_contributes_nothing(algo: str, policy: torch.nn.Module) -> None:
    batch = make_batch()
    want = one_step(make_runtime(algo, policy), policy, batch, [[0, 1]])
    runtime = make_runtime(algo, policy)
    runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=policy)
    mb = to_microbatch(batch, [0, 1])
    mb.doc_ids[1] = -1
    with torch.no_grad(), runtime.capture(policy):
        logits = policy(input_ids=mb.input_ids, position_ids=mb.position_ids, use_cache=False).logits
    out = runtime.loss(mb, logits)
    assert bool(out.loss.isfinite())
    assert 0.0 < float(out.loss) < want[0]


def test_trained_published_and_exported_sets_are_one(algo: str, policy: torch.nn.Module, tmp_path: Any) -> None:
    runtime = make_runtime(algo, policy)
    trained = {n for n, p in runtime.module.named_parameters() if p.requires_grad}
    streamed = dict(runtime.stream(policy))
    assert {f"draft.{n}" for n in trained} == streamed.keys()
    assert runtime.manifest().keys() == trained == set(runtime.spec.trained_names)
    runtime.export(str(tmp_path), policy)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == trained
    assert all(torch.equal(streamed[f"draft.{n}"], t) for n, t in stored.items())
    assert all(t.data_ptr() != p.data_ptr() for t in streamed.values() for p in runtime.module.parameters())


def test_frozen_parts_are_neither_trained_nor_sent(algo: str, policy: torch.nn.Module, tmp_path: Any) -> None:
    runtime = make_runtime(algo, policy, freeze=["fc", "layers.0.mlp"])
    frozen = set(runtime.spec.frozen)
    assert {"fc.weight", "layers.0.mlp.up_proj.weight"} < frozen
    assert not frozen & runtime.manifest().keys()
    assert not frozen & {n.removeprefix("draft.") for n, _ in runtime.stream(policy)}
    _, grads, _ = one_step(runtime, policy, make_batch(), [[0, 1, 2]])
    assert not frozen & grads.keys()
    assert len(runtime.param_group()["params"]) == len(list(runtime.module.parameters())) - len(frozen)
    runtime.export(str(tmp_path), policy)
    assert frozen < load_file(tmp_path / "model.safetensors").keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_load_export_is_byte_identical(algo: str, policy: torch.nn.Module, tmp_path: Any, dtype: str) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    runtime = make_runtime(algo, policy, dtype=dtype)
    with torch.no_grad():
        for p in runtime.module.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.05)
    runtime.export(str(first), policy)
    again = make_runtime(algo, policy, draft_dir=str(first), dtype=dtype)
    assert again.spec.architecture == runtime.spec.architecture
    again.export(str(second), policy)
    for name in ("config.json", "model.safetensors", "draft_meta.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    if dtype == "float32":
        assert_same(
            one_step(again, policy, make_batch(), [[0, 1, 2, 3]]),
            one_step(runtime, policy, make_batch(), [[0, 1, 2, 3]]),
        )


def test_resume_continues_bit_identically(algo: str, policy: torch.nn.Module) -> None:
    batch = make_batch()
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def train(runtime: Any, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            one_step(runtime, policy, batch, groups)
            optimizer.step()

    whole = make_runtime(algo, policy)
    optimizer = torch.optim.AdamW(whole.param_group()["params"], lr=1e-2)
    train(whole, optimizer, 2)
    saved = {n: t.clone() for n, t in whole.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    train(whole, optimizer, 2)

    resumed = make_runtime(algo, policy, seed=9)
    resumed.load_state_dict(saved)
    assert resumed.num_updates == 2
    optimizer = torch.optim.AdamW(resumed.param_group()["params"], lr=1e-2)
    optimizer.load_state_dict(state)
    train(resumed, optimizer, 2)
    assert resumed.num_updates == whole.num_updates == 4
    for name, p in whole.module.named_parameters():
        assert torch.equal(p, dict(resumed.module.named_parameters())[name]), name


def test_rotary_table_stays_fp32(algo: str, policy: torch.nn.Module) -> None:
    runtime = make_runtime(algo, policy)
    before = runtime.module.rope.inv_freq.clone()
    runtime.module.to(torch.bfloat16)
    assert runtime.module.rope.inv_freq.dtype == torch.float32
    assert torch.equal(runtime.module.rope.inv_freq, before)
    cos, sin = runtime.module.rope(torch.tensor([32768]), torch.float32)
    angles = 32768 * before
    torch.testing.assert_close(cos.flatten(), angles.cos())
    torch.testing.assert_close(sin.flatten(), angles.sin())
    assert not any("inv_freq" in name for name in runtime.state_dict())


def test_a_shifted_pairing_changes_the_result(algo: str, policy: torch.nn.Module) -> None:
    """The guard of the tests above: features moved by one token are not the same batch."""
    batch = make_batch()

    def shift(runtime: Any, mb: Any, logits: torch.Tensor) -> None:
        captured = runtime._capture._captured
        for key, state in captured.items():
            captured[key] = state.roll(1, dims=1)

    want = one_step(make_runtime(algo, policy), policy, batch, [[0, 1]])
    got = one_step(make_runtime(algo, policy), policy, batch, [[0, 1]], spoil=shift)
    assert got[0] != pytest.approx(want[0], rel=1e-4)
