"""The step loop over in-memory policy, engine and environment: order, counting, stopping and what it logs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.config import MasterConfig, RolloutStoreConfig
from nemo_rl.algorithms.grpo import GRPOComponents, GRPOState, PromptSource, grpo_train
from nemo_rl.algorithms.loss import ClippedPGLossFn
from nemo_rl.data.loader import PromptLoader
from nemo_rl.data.rollout_index import FeatureLayout, FeatureReport, FeatureRows, StoredFile, StoreIdentity
from nemo_rl.data.rollout_store import RolloutReader, RolloutWriter
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentReturn
from nemo_rl.errors import NonFiniteError, RefitError
from nemo_rl.models.generation.vllm.spec_metrics import SpecCounters
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.config import build_master_config
from nemo_rl.utils.logger import Logger, read_metrics
from nemo_rl.utils.timer import Timer
from nemo_rl.weight_sync.interfaces import RefitReport

NUM_PROMPTS, NUM_GENERATIONS = 3, 4


@dataclasses.dataclass(frozen=True)
class Prompt:
    prompt_ids: list[int]
    prompt_text: str
    metadata: dict[str, Any]
    too_long: bool = False


class Prompts:
    """Every third prompt is too long."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Prompt:
        if index >= self._size:
            raise IndexError(index)
        return Prompt([1, 2, 3 + index % 5], f"q{index}", {"index": index}, too_long=index % 3 == 2)


class Engine:
    """Counts one draft of two tokens per response, the first of them accepted; answers with the seed's last bit."""

    def __init__(self, log: list[str]) -> None:
        self.version, self.drafts, self._log, self.seeds = 0, 0, log, []

    def generate(self, data: BatchedDataDict, *, greedy: bool = False) -> BatchedDataDict:
        self._log.append("generate")
        n, width = data["input_ids"].shape
        self.drafts += n
        self.seeds.append(data["seeds"].tolist())
        answers = (data["seeds"] % 2 + 10)[:, None]
        return BatchedDataDict(
            {
                "output_ids": torch.cat([data["input_ids"], answers, answers], 1),
                "generation_lengths": torch.full((n,), 2),
                "unpadded_sequence_lengths": torch.full((n,), width + 2),
                "logprobs": torch.full((n, width + 2), -0.5),
                "finish_reasons": ["stop"] * n,
                "weight_versions": torch.full((n,), self.version),
            }
        )

    def spec_counters(self) -> SpecCounters:
        return SpecCounters(self.drafts, 2 * self.drafts, self.drafts, (self.drafts, 0))

    def prepare_for_generation(self) -> None:
        self._log.append("prepare")

    def finish_generation(self) -> None:
        self._log.append("finish")


class Learner:
    def __init__(self, log: list[str]) -> None:
        self._log, self.batches, self.skipped, self.draft = log, [], 0, None

    def prepare_for_training(self) -> None:
        self._log.append("prepare_for_training")

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        self._log.append("logprobs")
        return BatchedDataDict({"logprobs": torch.full_like(data["generation_logprobs"], -0.5)})

    def get_reference_policy_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        self._log.append("reference")
        return BatchedDataDict({"reference_logprobs": torch.full_like(data["generation_logprobs"], -0.6)})

    def train(self, data: BatchedDataDict, loss_fn: ClippedPGLossFn, *, step: int) -> dict[str, Any]:
        self._log.append(f"train{step}")
        self.batches.append(data)
        tokens = data["token_mask"].sum()
        out = loss_fn(
            torch.full_like(data["generation_logprobs"], -0.5),
            data,
            global_valid_toks=tokens,
            global_valid_seqs=data["sample_mask"].sum(),
        )
        return {
            "loss": float(out.loss),
            "grad_norm": 1.0,
            "lr": 0.1,
            "global_valid_toks": float(tokens),
            "metrics": {name: (float(num), float(den)) for name, (num, den) in out.metrics.items()},
            "draft": self.draft,
            "num_skipped_updates": self.skipped,
            "timing": {"forward_backward": 0.25},
        }

    def offload_after_refit(self) -> None:
        self._log.append("offload")

    def save_checkpoint(self, directory: str) -> None:
        self._log.append("save")
        (Path(directory) / "policy").mkdir()
        (Path(directory) / "policy" / "weights").write_bytes(b"w")

    def export_hf(self, directory: str) -> None:
        self._log.append(f"export {Path(directory).name}")


class Sync:
    def __init__(self, log: list[str], engine: Engine) -> None:
        self._log, self._engine, self.fail_at = log, engine, None

    def sync(self, version: int) -> RefitReport:
        if version == self.fail_at:
            raise RefitError("half an update")
        self._log.append(f"sync{version}")
        self._engine.version = version
        return RefitReport(version, 0.1, 0.2, True, 7)


class Parity:
    """Reward 1 for an odd seed: groups of four mostly differ."""

    def step(self, responses: list[str], metadata: list[dict[str, Any]]) -> EnvironmentReturn:
        rewards = [float(text.endswith("11")) for text in responses]
        return EnvironmentReturn(rewards, list(responses), {"answered": (len(rewards), len(rewards))})

    def shutdown(self) -> None: ...


def make(tmp_path: Path, policy: dict[str, Any] | None = None, **grpo: Any) -> tuple[GRPOComponents, list[str]]:
    log: list[str] = []
    settings = {
        "num_prompts_per_step": NUM_PROMPTS,
        "num_generations_per_prompt": NUM_GENERATIONS,
        "max_num_steps": 3,
        "val_period": 2,
    } | grpo
    cfg: MasterConfig = build_master_config(
        {
            "policy": {"model_name": "unused", "train_global_batch_size": NUM_PROMPTS * NUM_GENERATIONS}
            | (policy or {}),
            "grpo": settings,
            "checkpointing": {"checkpoint_dir": str(tmp_path / "checkpoints"), "save_period": 2},
            "logger": {"log_dir": str(tmp_path / "logs"), "tensorboard_enabled": False},
        }
    )
    engine = Engine(log)
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
    components = GRPOComponents(
        cfg=cfg,
        policy=Learner(log),
        generation=engine,
        synchronizer=Sync(log, engine),
        environment=Parity(),
        tokenizer=tokenizer,
        pad_token_id=0,
        loader=PromptLoader(Prompts(60), 1, shuffle=False, seed=0),
        val_dataset=Prompts(9),
        loss_fn=ClippedPGLossFn(cfg.loss_fn),
        logger=Logger(cfg.logger, run_config={}),
        timer=Timer(),
        checkpointer=CheckpointManager(cfg.checkpointing),
        state=GRPOState(),
        on_step=lambda step, metrics: log.append(f"shown{step}"),
        on_validation=lambda step, result: log.append(f"validated{step}"),
    )
    return components, log


def test_order_of_a_step(tmp_path: Path) -> None:
    components, log = make(tmp_path, max_num_steps=2)
    grpo_train(components)
    first = [
        "prepare",
        "generate",
        "finish",
        "prepare_for_training",
        "logprobs",
        "reference",
        "train0",
        "sync1",
        "offload",
        "shown1",
    ]
    second = [*first[:6], "train1", "sync2", "offload", "generate", "validated2", "save", "shown2"]
    assert log == first + second


def test_metrics_state_and_checkpoint_describe_the_run(tmp_path: Path) -> None:
    components, _ = make(tmp_path)
    state = grpo_train(components)
    assert (state.step, state.consumed_samples, state.validated_step) == (3, 9, 2)
    table = read_metrics(components.logger.metrics_path)
    assert list(table["train/rollout_weight_version"].values()) == [0.0, 1.0, 2.0]
    assert table["train/num_prompts_dropped"][1] == 1.0  # prompts 0, 1, (2), 3
    assert table["vllm/spec_acceptance_length"] == {1: 2.0, 2: 2.0, 3: 2.0}
    assert table["vllm/spec_num_drafts"][3] == NUM_PROMPTS * NUM_GENERATIONS  # deltas, validation not counted
    assert table["validation/num_samples"] == {2: 6.0}
    assert table["train/token_mult_prob_error"][1] == pytest.approx(1.0)
    resume = components.checkpointer.find_resume_point(algorithm="grpo")
    assert resume.step == 3
    restored = GRPOState.from_dict(resume.training_info)
    assert restored.val_metrics == {}  # validated at step 2, not 3: older figures must not rank these weights
    assert dataclasses.replace(restored, val_metrics=state.val_metrics) == state
    assert resume.training_info["train_metrics"]["train/reward"] == table["train/reward"][3]


TRAINED_DRAFT = {
    "loss": 2.0,
    "grad_norm": 0.5,
    "lr": 0.1,
    "scalars": {"expected_acceptance_length": 1.75, "num_skipped_updates": 0.0},
    "metrics": {"prefix_greedy_1": (9.0, 12.0), "prefix_greedy_2": (0.0, 12.0)},
}


@pytest.mark.parametrize("is_served", [True, False], ids=["served", "not-served"])
def test_the_gap_between_engine_and_trainer_is_logged_for_a_served_draft(tmp_path: Path, is_served: bool) -> None:
    """The engine of these tests accepts the first of two tokens always: length 2, rates 1 and 0."""
    spec = {"num_speculative_tokens": 2} | ({} if is_served else {"method": "ngram"})
    policy = {
        "draft": {"enabled": True, "serve": is_served},
        "generation": {"vllm_kwargs": {"speculative_config": spec}},
    }
    components, _ = make(tmp_path, policy, max_num_steps=1)
    components.policy.draft = TRAINED_DRAFT
    grpo_train(components)
    table = read_metrics(components.logger.metrics_path)
    assert table["train/draft_expected_acceptance_length"] == {1: 1.75}
    gaps = {name: values[1] for name, values in table.items() if name.startswith("train/draft_acceptance_gap")}
    expected = {
        "train/draft_acceptance_gap": 0.25,
        "train/draft_acceptance_gap_1": 0.25,
        "train/draft_acceptance_gap_2": 0.0,
    }
    assert gaps == (expected if is_served else {})


def test_a_step_that_did_not_train_the_draft_logs_nothing_of_it(tmp_path: Path) -> None:
    policy = {
        "draft": {"enabled": True},
        "generation": {"vllm_kwargs": {"speculative_config": {"num_speculative_tokens": 2}}},
    }
    components, _ = make(tmp_path, policy, max_num_steps=1)
    grpo_train(components)
    assert not [name for name in read_metrics(components.logger.metrics_path) if name.startswith("train/draft")]


def test_consolidated_weights_are_saved_on_request(tmp_path: Path) -> None:
    components, log = make(tmp_path / "off", max_num_steps=1)
    grpo_train(components)
    assert "export policy_hf" not in log
    components, log = make(tmp_path / "on", max_num_steps=1)
    checkpointing = components.cfg.checkpointing.model_copy(update={"save_consolidated": True})
    components.cfg = components.cfg.model_copy(update={"checkpointing": checkpointing})
    grpo_train(components)
    assert log[log.index("save") + 1] == "export policy_hf"


def test_seeds_depend_on_the_step_alone(tmp_path: Path) -> None:
    components, _ = make(tmp_path / "a")
    grpo_train(components)
    late, _ = make(tmp_path / "b")
    late.state.step = 1
    grpo_train(late)
    assert late.generation.seeds[0] == components.generation.seeds[1]
    flat = [seed for step in components.generation.seeds for seed in step]
    assert len(set(flat)) == len(flat)


def test_advantages_are_zero_off_the_sampled_tokens(tmp_path: Path) -> None:
    components, _ = make(tmp_path, max_num_steps=1)
    grpo_train(components)
    batch = components.policy.batches[0]
    assert batch["token_mask"].sum() == 2 * batch.size
    assert batch["advantages"][~batch["token_mask"]].abs().sum() == 0
    assert batch["sample_index"].tolist() == list(range(batch.size))
    assert batch["generation_logprobs"][~batch["token_mask"]].abs().sum() == 0


def test_data_ends_the_run_after_its_epochs(tmp_path: Path) -> None:
    components, _ = make(tmp_path, max_num_steps=100, max_num_epochs=2)
    state = grpo_train(components)
    # 60 prompts, 20 of them too long, 3 per step, two epochs: the last incomplete step is not run.
    assert state.step == 2 * 40 // NUM_PROMPTS
    assert components.checkpointer.find_resume_point().step == state.step


def test_prompt_source_counts_what_it_drops() -> None:
    source = PromptSource(PromptLoader(Prompts(9), 1, shuffle=False, seed=0), max_epochs=1)
    assert [p.metadata["index"] for p in source.draw(4)] == [0, 1, 3, 4]
    assert source.num_dropped == 1
    assert [p.metadata["index"] for p in source.draw(2)] == [6, 7]
    assert source.draw(1) is None


def test_skipped_updates_in_a_row_stop_the_run(tmp_path: Path) -> None:
    components, log = make(tmp_path, max_num_steps=10, max_nonfinite_steps=2)
    components.policy.skipped = 1
    with pytest.raises(NonFiniteError, match="max_nonfinite_steps=2"):
        grpo_train(components)
    assert "train1" in log
    assert "train2" not in log


def test_nothing_is_generated_after_a_failed_refit(tmp_path: Path) -> None:
    components, log = make(tmp_path)
    components.synchronizer.fail_at = 2
    with pytest.raises(RefitError):
        grpo_train(components)
    assert log[-1] == "train1"


def test_validation_target_stops_the_run_and_saves(tmp_path: Path) -> None:
    components, log = make(
        tmp_path,
        max_num_steps=50,
        val_period=1,
        stop_at_validation_metric="mean_reward",
        stop_at_validation_threshold=0.0,
    )
    assert grpo_train(components).step == 1
    assert "save" in log


def test_validation_at_start_and_end(tmp_path: Path) -> None:
    components, log = make(tmp_path, max_num_steps=1, val_period=0, val_at_start=True, val_at_end=True)
    grpo_train(components)
    assert [entry for entry in log if entry.startswith("validated")] == ["validated0", "validated1"]


def test_dynamic_sampling_fills_the_batch_with_informative_groups(tmp_path: Path) -> None:
    components, _ = make(tmp_path, max_num_steps=1, use_dynamic_sampling=True, batch_multiplier=1.5)
    grpo_train(components)
    rewards = components.policy.batches[0]["rewards"].view(NUM_PROMPTS, NUM_GENERATIONS)
    assert (rewards.amax(-1) != rewards.amin(-1)).all()
    table = read_metrics(components.logger.metrics_path)
    assert table["train/dynamic_sampling_num_gen_batches"][1] >= 1.0


# -- recording -------------------------------------------------------------------------------------------------------


def writer_of(tmp_path: Path, *, resume_step: int | None = None, features: bool = False, **cfg: Any) -> RolloutWriter:
    layout = FeatureLayout(ids=(1,), size=8, dtype="float32") if features else None
    identity = StoreIdentity(vocab_size=20, tokenizer="t", policy="p", policy_name="tiny", features=layout)
    store = RolloutStoreConfig(mode="record", dir=str(tmp_path / "rollouts"), features=features, **cfg)
    return RolloutWriter(store, identity, run="results/a", resume_step=resume_step)


def test_every_step_records_what_was_trained_on(tmp_path: Path) -> None:
    components, _ = make(tmp_path, seq_logprob_error_threshold=0.5, use_dynamic_sampling=True, batch_multiplier=1.5)
    components.rollout_writer = writer_of(tmp_path)
    grpo_train(components)
    size = NUM_PROMPTS * NUM_GENERATIONS
    reader = RolloutReader(tmp_path / "rollouts")
    assert (reader.num_samples, reader.versions) == (3 * size, (0, 1, 2))
    for step, batch in enumerate(components.policy.batches):
        got = reader.samples(range(step * size, (step + 1) * size))
        width = got["input_ids"].shape[1]
        for name in ("token_mask", "generation_logprobs", "sample_mask", "rewards", "response_lengths", "truncated"):
            want = batch[name][:, :width] if batch[name].ndim == 2 else batch[name]
            assert torch.equal(got[name], want), name
        is_token = torch.arange(width)[None] < batch["input_lengths"][:, None]
        assert torch.equal(got["input_ids"] * is_token, batch["input_ids"][:, :width] * is_token)
        assert got["sample_mask"].sum() == 0, "the filter behind the log-probabilities counts"
    table = read_metrics(components.logger.metrics_path)
    sizes = list(table["train/rollout_store_gigabytes"].values())
    assert sizes[-1] == components.rollout_writer.gigabytes > sizes[0] > 0
    assert "train/rollout_store_samples_dropped" not in table
    assert set(table["timing/train/recording"]) == {1, 2, 3}


def test_recording_does_not_change_the_run(tmp_path: Path) -> None:
    components, log = make(tmp_path / "a")
    components.rollout_writer = writer_of(tmp_path)
    grpo_train(components)
    plain, plain_log = make(tmp_path / "b")
    grpo_train(plain)
    assert log == plain_log
    for got, want in zip(components.policy.batches, plain.policy.batches, strict=True):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], column) for name, column in want.items())


def test_features_are_taken_before_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    components, log = make(tmp_path, max_num_steps=2)

    def collect_features(data: BatchedDataDict, *, directory: str, stem: str) -> list[FeatureReport]:
        log.append("features")
        path = Path(directory) / f"{stem}_features_00.safetensors"
        path.write_bytes(b"states")
        lengths = dict(enumerate(data["input_lengths"].tolist()))
        rows = {i: FeatureRows(n, 0) for i, n in lengths.items() if i != 5}
        return [FeatureReport(StoredFile(name=path.name, bytes=6), rows, (5,))]

    monkeypatch.setattr(components.policy, "collect_features", collect_features, raising=False)
    components.rollout_writer = writer_of(tmp_path, features=True)
    grpo_train(components)
    assert log[log.index("features") : log.index("sync1")] == ["features", "train0"]
    assert log.count("features") == 2
    table = read_metrics(components.logger.metrics_path)
    assert table["train/rollout_store_samples_dropped"] == {1: 1.0, 2: 1.0}
    assert RolloutReader(tmp_path / "rollouts").num_samples == 2 * (NUM_PROMPTS * NUM_GENERATIONS - 1)


def test_a_full_store_asks_for_no_more_features(tmp_path: Path) -> None:
    components, log = make(tmp_path, max_num_steps=1)
    components.rollout_writer = writer_of(tmp_path, features=True, max_gigabytes=1e-9)
    components.rollout_writer._max_bytes = 0
    grpo_train(components)  # this policy has no such method
    assert "sync1" in log


def test_a_resumed_run_records_no_step_twice(tmp_path: Path) -> None:
    """Killed in the refit of step 3, whose samples are recorded, with a checkpoint of step 2."""
    components, _ = make(tmp_path, max_num_steps=4)
    components.rollout_writer = writer_of(tmp_path)
    components.synchronizer.fail_at = 3
    with pytest.raises(RefitError):
        grpo_train(components)
    size = NUM_PROMPTS * NUM_GENERATIONS
    assert RolloutReader(tmp_path / "rollouts").num_samples == 3 * size
    resume = components.checkpointer.find_resume_point()
    assert resume.step == 2
    again, _ = make(tmp_path, max_num_steps=4)
    again.state.step = again.generation.version = resume.step
    again.rollout_writer = writer_of(tmp_path, resume_step=resume.step)
    grpo_train(again)
    reader = RolloutReader(tmp_path / "rollouts")
    assert (reader.num_samples, reader.versions) == (4 * size, (0, 1, 2, 3))
    ids = reader.samples(range(2 * size, 3 * size))["input_ids"]
    assert torch.equal(ids, again.policy.batches[0]["input_ids"][:, : ids.shape[1]])
