"""States from a store in place of the policy's forward: what a draft learns from them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.config import RolloutStoreConfig
from nemo_rl.data.rollout_index import FeatureLayout, FeatureReport, StoreIdentity
from nemo_rl.data.rollout_store import RolloutReader, RolloutWriter
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.models.automodel.data import Microbatch, MicrobatchSpec, make_microbatch, zero_weight_sample
from nemo_rl.models.automodel.draft.registry import build_draft_runtime, resolve_spec
from nemo_rl.models.automodel.recorded_policy import FeatureRecorder, RecordedPolicy
from tests.unit.models.automodel.draft.algorithms import ALGORITHMS, K, config_for
from tests.unit.models.automodel.draft.helpers import to_microbatch
from tests.unit.models.automodel.draft.scenarios import make_batch

VOCAB = 320
CPU = torch.device("cpu")
IDENTITY = {"vocab_size": VOCAB, "tokenizer": "t", "policy": "p", "policy_name": "tiny"}


@pytest.fixture(scope="module")
def policy(draft_policy_dir: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(draft_policy_dir, attn_implementation="sdpa").eval()


def forward_of(policy: Any) -> Callable[[Microbatch], torch.Tensor]:
    return lambda mb: policy(input_ids=mb.input_ids, position_ids=mb.position_ids, use_cache=False).logits


def recorder_of(policy: Any, ids: tuple[int, ...], *, forward: Any = None, mode: str = "fixed") -> FeatureRecorder:
    return FeatureRecorder(
        model=policy,
        forward=forward or forward_of(policy),
        feature_ids=ids,
        num_layers=4,
        spec=MicrobatchSpec(mode, 3, 64, 1, "concatenative"),
        parallel=SimpleNamespace(device=CPU, dp_group=None),
        dtype=torch.float32,
    )


def training_batch(**changes: Any) -> BatchedDataDict:
    batch = make_batch()
    n = batch.size
    batch["generation_logprobs"] = torch.zeros(batch["input_ids"].shape)
    batch["rewards"], batch["truncated"] = torch.zeros(n), torch.zeros(n, dtype=torch.bool)
    batch["response_lengths"] = batch["token_mask"].sum(1).long()
    return BatchedDataDict(batch.get_dict() | changes)


def record(
    directory: Path, policy: Any, ids: tuple[int, ...], *, batch: BatchedDataDict | None = None, **recorder: Any
) -> int:
    """One step with features; returns how many samples were left out."""
    batch = batch or training_batch()
    identity = StoreIdentity(features=FeatureLayout(ids=ids, size=64, dtype="float32"), **IDENTITY)
    cfg = RolloutStoreConfig(mode="record", dir=str(directory), features=True)
    writer = RolloutWriter(cfg, identity, run="a", resume_step=None)
    report = recorder_of(policy, ids, **recorder).collect(
        batch, path=directory / f"{writer.stem(1)}_features_00.safetensors"
    )
    return writer.add(1, batch, versions=frozenset({0}), features=[report])


def recorded_of(directory: Path, policy: Any, ids: Sequence[int]) -> RecordedPolicy:
    return RecordedPolicy(policy, RolloutReader(directory), feature_ids=ids, num_layers=4, dtype=torch.float32)


@pytest.fixture(scope="module")
def stored(policy: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with every state that a draft of these tests reads, from batches of other shapes than those below."""
    directory = tmp_path_factory.mktemp("store")
    assert record(directory, policy, (0, 1, 2, 3, 4), mode="dynamic") == 0
    return directory


def one_step(
    runtime: Any,
    policy: Any,
    batch: BatchedDataDict,
    groups: Sequence[Sequence[int]],
    *,
    model: Any,
    forward: Any,
    mode: str,
) -> tuple[float, dict[str, torch.Tensor]]:
    runtime.module.zero_grad(set_to_none=True)
    runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=policy)
    loss = 0.0
    for group in groups:
        mb = to_microbatch(batch, group, mode=mode, multiple=4)
        with torch.no_grad(), runtime.capture(model):
            logits = forward(mb)
        out = runtime.loss(mb, logits)
        out.loss.backward()
        loss += float(out.loss.detach())
    return loss, {n: p.grad.clone() for n, p in runtime.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_draft_learns_the_same_from_recorded_states(algo: str, policy: Any, stored: Path) -> None:
    cfg = config_for(algo)
    spec = resolve_spec(cfg, policy_config=policy.config.to_dict(), k=K, max_model_len=64, dtype="float32")
    runtime = build_draft_runtime(cfg, spec, policy_model=policy, device="cpu", dtype="float32", draft_dir=None, seed=1)
    recorded = recorded_of(stored, policy, spec.architecture.feature_ids)
    batch = RolloutReader(stored).samples(range(8))
    groups = [[0, 1, 2, 3, 4], [5, 6, 7]]
    for mode in ("fixed", "packed"):
        want = one_step(runtime, policy, batch, groups, model=policy, forward=forward_of(policy), mode=mode)
        # The runtime sees the stand-in alone: its embedding and head are the policy's.
        got = one_step(runtime, recorded, batch, groups, model=recorded, forward=recorded, mode=mode)
        assert want[0] > 0.1
        assert got[0] == pytest.approx(want[0], rel=1e-6)
        assert got[1].keys() == want[1].keys()
        for name, grad in want[1].items():
            torch.testing.assert_close(got[1][name], grad, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_states_and_logits_are_those_of_the_forward_they_were_taken_from(policy: Any, tmp_path: Path) -> None:
    """Bit by bit, in rows of the same shape."""
    batch = training_batch()
    record(tmp_path, policy, (0, 1, 4))
    recorded = recorded_of(tmp_path, policy, (0, 1, 4))
    mb = make_microbatch(batch, [3, 4, 5], MicrobatchSpec("fixed", 3, 64, 1, "concatenative"), device=CPU)
    with torch.no_grad():
        out = policy.model(mb.input_ids, position_ids=mb.position_ids, output_hidden_states=True, use_cache=False)
        logits = policy.lm_head(out.last_hidden_state)
        got = recorded(mb)
    is_token = mb.doc_ids >= 0
    assert torch.equal(got[is_token], logits[is_token])
    rows = [recorded._reader.features(number) for number in (3, 4, 5)]
    for i, (states, length) in enumerate(zip(rows, batch["input_lengths"][3:6].tolist(), strict=True)):
        assert states.shape == (length, 4, 64)
        assert torch.equal(states[:, 0], out.hidden_states[0][i, :length])
        assert torch.equal(states[:, 1], out.hidden_states[1][i, :length])
        assert torch.equal(states[:, 3], out.last_hidden_state[i, :length])


def test_recording_leaves_no_trace_in_the_policy(policy: Any, tmp_path: Path) -> None:
    policy.train()
    hooks = [len(module._forward_hooks) for module in policy.modules()]
    recorder_of(policy, (1,)).collect(training_batch(), path=tmp_path / "run_01_step_000001_features_00.safetensors")
    assert policy.training
    assert [len(module._forward_hooks) for module in policy.modules()] == hooks
    assert all(p.grad is None for p in policy.parameters())
    policy.eval()


def test_a_micro_batch_that_only_keeps_ranks_in_step_needs_the_beginning_of_a_sample(policy: Any, stored: Path) -> None:
    recorded = recorded_of(stored, policy, (1,))
    padding = zero_weight_sample(RolloutReader(stored).samples([2, 3]))
    assert recorded(to_microbatch(padding, [0])).shape == (1, 2, VOCAB)
    foreign = RolloutReader(stored).samples([2])
    foreign["input_lengths"][0] -= 1
    with pytest.raises(RuntimeError, match="sample 2: the micro-batch has 13 tokens, the store has states for 14"):
        recorded(to_microbatch(foreign, [0]))


def test_samples_with_states_that_are_not_finite_are_left_out(
    policy: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def poisoned(mb: Microbatch) -> torch.Tensor:
        handle = policy.model.layers[0].register_forward_hook(
            lambda module, args, out: out.masked_fill((mb.input_ids == 7)[..., None], float("nan")), prepend=True
        )
        try:
            return forward_of(policy)(mb)
        finally:
            handle.remove()

    batch = training_batch()
    batch["input_ids"].masked_fill_(batch["input_ids"] == 7, 8)
    batch["input_ids"][4, 3] = 7
    assert record(tmp_path, policy, (1,), batch=batch, forward=poisoned) == 1
    assert "samples [4] are not recorded" in caplog.text
    reader = RolloutReader(tmp_path)
    assert reader.samples(range(7))["input_lengths"].tolist() == [19, 6, 14, 9, 3, 17, 8]
    # Behind the hole, numbers in the store and in the step differ.
    states = load_file(tmp_path / "run_01_step_000001_features_00.safetensors")
    assert "4" not in states
    assert all(torch.equal(reader.features(n), states[str(i)]) for n, i in enumerate((0, 1, 2, 3, 5, 6, 7)))


def test_samples_whose_states_do_not_cover_their_tokens_are_left_out(
    policy: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batch = training_batch()
    short = batch.select_indices(range(8))
    short["input_lengths"][2] = 10
    identity = StoreIdentity(features=FeatureLayout(ids=(1,), size=64, dtype="float32"), **IDENTITY)
    writer = RolloutWriter(
        RolloutStoreConfig(mode="record", dir=str(tmp_path), features=True), identity, run="a", resume_step=None
    )
    report = recorder_of(policy, (1,)).collect(short, path=tmp_path / f"{writer.stem(1)}_features_00.safetensors")
    lost = FeatureReport(report.file, {i: rows for i, rows in report.samples.items() if i != 6}, ())
    assert writer.add(1, batch, versions=frozenset({0}), features=[lost]) == 2
    assert "2 (10 of 14), 6 (0 of 17)" in caplog.text
    assert RolloutReader(tmp_path).num_samples == 6


def test_damaged_states_are_named(policy: Any, tmp_path: Path) -> None:
    record(tmp_path, policy, (1,))
    path = tmp_path / "run_01_step_000001_features_00.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    reader = RolloutReader(tmp_path)
    with pytest.raises(CheckpointError, match=f"{path.name}: the states of sample . are not what was written"):
        [reader.features(i) for i in range(8)]
    path.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=rf"{path.name}: has \d+ bytes; \d+ were written"):
        RolloutReader(tmp_path)
    path.write_bytes(whole)
    states = load_file(path)
    del states["5"]
    save_file(states, path)
    with pytest.raises(ConfigError, match=path.name):
        RolloutReader(tmp_path)


def test_a_policy_whose_logits_are_not_its_head_on_the_final_state_is_refused(policy: Any, tmp_path: Path) -> None:
    capped = lambda mb: 3 * (forward_of(policy)(mb) / 3).tanh()  # noqa: E731 - a soft cap behind the head
    with pytest.raises(ConfigError, match="are not its head applied to its final state"):
        record(tmp_path, policy, (1,), forward=capped)


def test_a_store_without_a_state_that_the_draft_reads_is_refused(policy: Any, tmp_path: Path) -> None:
    record(tmp_path, policy, (1, 2))
    with pytest.raises(ConfigError, match=r"lacks the states after layers \[2\]"):
        recorded_of(tmp_path, policy, (1, 3))
