"""The loop of a draft run over in-memory policy, engine and store: order, counting, saving and what it refuses."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.config import DRAFT_ALGORITHM, MasterConfig
from nemo_rl.algorithms.conflicts import draft_run_conflicts
from nemo_rl.algorithms.draft_run import (
    DraftRunComponents,
    DraftRunState,
    Evaluator,
    PromptSamples,
    RecordedSamples,
    draft_train,
)
from nemo_rl.algorithms.draft_run_setup import ranking_of
from nemo_rl.algorithms.grpo import DATALOADER_FILE
from nemo_rl.data.loader import PromptLoader
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.errors import CheckpointError, ConfigError, NonFiniteError
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.config import build_master_config
from nemo_rl.utils.logger import Logger, read_metrics
from nemo_rl.utils.timer import Timer
from nemo_rl.weight_sync.interfaces import RefitReport
from tests.unit.algorithms.test_grpo_loop import Engine, Prompts

PER_STEP = 4


class Learner:
    """Trains nothing, reports fixed figures."""

    def __init__(self, log: list[str]) -> None:
        self._log, self.batches, self.skipped = log, [], 0

    def prepare_for_training(self) -> None:
        self._log.append("prepare_for_training")

    def train_draft(self, data: BatchedDataDict, *, step: int) -> dict[str, Any]:
        self._log.append(f"train{step}")
        self.batches.append(data)
        return {
            "loss": 2.0 / (1 + step),
            "grad_norm": 0.5,
            "lr": 0.1,
            "scalars": {"expected_acceptance_length": 1.75, "num_skipped_updates": float(self.skipped)},
            "metrics": {"prefix_greedy_1": (9.0, 12.0), "prefix_greedy_2": (0.0, 12.0)},
            "global_valid_toks": float(data["token_mask"].sum()),
            "global_valid_seqs": float(data.size),
            "num_microbatches": 1,
            "timing": {"draft_s": 0.25},
        }

    def offload_after_refit(self) -> None:
        self._log.append("offload")

    def save_checkpoint(self, directory: str) -> None:
        self._log.append("save")
        (Path(directory) / "draft").mkdir()
        (Path(directory) / "draft" / "model.safetensors").write_bytes(b"w")


class Sync:
    """Stamps the engine; the first update, before the loop, was of version 0."""

    def __init__(self, log: list[str], engine: Engine, version: int) -> None:
        self._log, self._engine, self.version = log, engine, version
        engine.version = version

    def sync(self, version: int, *, draft_only: bool = False) -> RefitReport:
        assert draft_only
        assert version > self.version
        self._log.append(f"sync{version}")
        self.version = self._engine.version = version
        return RefitReport(version, 0.1, 0.2, True, 7)


class Store:
    """Ten recorded samples."""

    num_samples = 10

    def num_batches_per_epoch(self, batch_size: int) -> int:
        return self.num_samples // batch_size

    def batches(self, *, batch_size: int, seed: int, start: int = 0) -> Iterator[BatchedDataDict]:
        for number in itertools.count(start):
            yield BatchedDataDict(
                {
                    "input_ids": torch.full((batch_size, 6), number),
                    "input_lengths": torch.full((batch_size,), 6),
                    "token_mask": torch.ones(batch_size, 6, dtype=torch.bool),
                    "sample_mask": torch.ones(batch_size),
                    "sample_index": torch.arange(batch_size) + number * batch_size,
                }
            )


def config(tmp_path: Path, *, draft: dict[str, Any] | None = None, **draft_run: Any) -> MasterConfig:
    own = {name: draft_run.pop(name) for name in ("rollout_store", "grpo") if name in draft_run}
    return build_master_config(
        {
            "policy": {
                "model_name": "unused",
                "train_global_batch_size": 512,
                "draft": {"enabled": True} | (draft or {}),
                "generation": {"vllm_kwargs": {"speculative_config": {"num_speculative_tokens": 2}}},
            },
            "draft_run": {"num_prompts_per_step": PER_STEP, "max_num_steps": 3} | draft_run,
            "checkpointing": {"checkpoint_dir": str(tmp_path / "checkpoints"), "save_period": 2, "metric_name": None},
            "logger": {"log_dir": str(tmp_path / "logs"), "tensorboard_enabled": False},
            **own,
        }
    )


def make(tmp_path: Path, *, is_served: bool = True, **draft_run: Any) -> tuple[DraftRunComponents, list[str]]:
    log: list[str] = []
    cfg = config(tmp_path, **draft_run)
    engine, seed = Engine(log), cfg.grpo.seed
    checkpointer = CheckpointManager(cfg.checkpointing)
    resume = checkpointer.find_resume_point(algorithm=DRAFT_ALGORITHM)
    state = DraftRunState() if resume is None else DraftRunState.from_dict(resume.training_info)
    if cfg.draft_run.source == "prompts":
        loader = PromptLoader(Prompts(60), 1, shuffle=False, seed=0)
        source = PromptSamples(engine, loader, cfg.draft_run, seed=seed, pad_token_id=0, is_draft_served=is_served)
    else:
        source = RecordedSamples(Store(), cfg.draft_run, seed=seed, batch_size=cfg.draft_run_step_size, max_length=8)
    if resume is not None:
        source.load_state_dict(json.loads((resume.path / DATALOADER_FILE).read_text()))
    components = DraftRunComponents(
        cfg=cfg,
        policy=Learner(log),
        source=source,
        synchronizer=Sync(log, engine, state.step) if is_served else None,
        evaluator=Evaluator(engine, list(Prompts(2)), seed=seed, pad_token_id=0) if is_served else None,
        logger=Logger(cfg.logger, run_config={}, resume_step=None if resume is None else resume.step),
        timer=Timer(),
        checkpointer=checkpointer,
        state=state,
        on_step=lambda step, metrics: log.append(f"shown{step}"),
        on_evaluation=lambda step, metrics: log.append(f"evaluated{step}"),
    )
    return components, log


GENERATE = ["prepare", "generate", "finish"]


def test_order_of_a_run_from_prompts(tmp_path: Path) -> None:
    components, log = make(tmp_path, max_num_steps=2)
    draft_train(components)
    step = [*GENERATE, "prepare_for_training", "train{}", "sync{}", "offload"]
    first, second = ([entry.format(i + (entry[0] == "s")) for entry in step] for i in (0, 1))
    assert log == [
        *GENERATE,
        "evaluated0",
        *first,
        "shown1",
        *second,
        *GENERATE,
        "evaluated2",
        "save",
        "shown2",
    ]


def test_recorded_samples_send_the_draft_only_to_be_measured(tmp_path: Path) -> None:
    components, log = make(tmp_path, source="rollouts", max_num_steps=3, max_num_epochs=2, eval_period=2)
    draft_train(components)
    assert [entry for entry in log if entry.startswith(("sync", "evaluated", "train"))] == [
        *("evaluated0", "train0", "train1", "sync2", "evaluated2", "train2", "sync3", "evaluated3")
    ]
    assert log.count("generate") == 3
    table = read_metrics(components.logger.metrics_path)
    assert table["refit/version"] == {2: 2.0, 3: 3.0}
    assert "performance/rollout_tokens_per_sec" not in table
    assert "train/draft_acceptance_gap" not in table


def test_a_draft_that_is_not_served_is_not_measured(tmp_path: Path) -> None:
    components, log = make(tmp_path, is_served=False, max_num_steps=1)
    draft_train(components)
    assert log == [*GENERATE, "prepare_for_training", "train0", "save", "shown1"]


def test_metrics_state_and_checkpoint_describe_the_run(tmp_path: Path) -> None:
    components, _ = make(tmp_path, num_generations_per_prompt=2)
    state = draft_train(components)
    assert (state.step, state.consumed_samples, state.total_valid_tokens) == (3, 24, 48)
    table = read_metrics(components.logger.metrics_path)
    assert table["train/draft_loss"] == {1: 2.0, 2: 1.0, 3: pytest.approx(2 / 3)}
    assert list(table["train/rollout_weight_version"].values()) == [0.0, 1.0, 2.0]
    # The engine of these tests accepts the first of two tokens always.
    assert table["vllm/spec_acceptance_length"] == {1: 2.0, 2: 2.0, 3: 2.0}
    assert table["vllm/spec_num_drafts"] == {1: 8.0, 2: 8.0, 3: 8.0}
    assert table["train/draft_acceptance_gap"] == {1: 0.25, 2: 0.25, 3: 0.25}
    assert table["eval/acceptance_rate_pos_0"] == {0: 1.0, 3: 1.0}
    assert table["eval/acceptance_length"] == {0: 2.0, 3: 2.0}
    assert table["eval/num_prompts"] == {0: 2.0, 3: 2.0}
    assert not [name for name in table if name.startswith(("train/reward", "train/loss", "validation"))]
    resume = components.checkpointer.find_resume_point(algorithm=DRAFT_ALGORITHM)
    assert resume is not None
    assert resume.training_info["val_metrics"]["acceptance_length"] == 2.0
    assert DraftRunState.from_dict(resume.training_info) == state
    with pytest.raises(ConfigError, match=r"checkpoint of a 'draft' run.*policy\.draft\.model_name=.*/step_3/draft"):
        components.checkpointer.find_resume_point(algorithm="grpo")


def test_samples_and_seeds_are_those_of_the_step(tmp_path: Path) -> None:
    components, _ = make(tmp_path / "a")
    draft_train(components)
    late, _ = make(tmp_path / "b")
    late.state.step = 1
    late.synchronizer.version = 1
    draft_train(late)
    first, second = (c.source._generation.seeds for c in (components, late))
    assert first[0] == first[-1] == second[-1]  # of the evaluations
    assert second[0] == first[2]
    assert len({tuple(seeds) for seeds in first[1:-1]}) == 3


@pytest.mark.parametrize("source", ["prompts", "rollouts"])
def test_a_resumed_run_draws_what_the_whole_one_did(tmp_path: Path, source: str) -> None:
    settings = {"source": source, "max_num_epochs": 3}
    whole, _ = make(tmp_path / "whole", **settings, max_num_steps=4)
    draft_train(whole)
    draft_train(make(tmp_path / "two", **settings, max_num_steps=2)[0])
    resumed, log = make(tmp_path / "two", **settings, max_num_steps=4)
    draft_train(resumed)
    assert "evaluated0" not in log
    for got, want in zip(resumed.policy.batches, whole.policy.batches[2:], strict=True):
        assert torch.equal(got["input_ids"], want["input_ids"])
    assert resumed.state == whole.state


def test_samples_end_the_run_after_their_epochs(tmp_path: Path) -> None:
    components, log = make(tmp_path, source="rollouts", max_num_steps=100, max_num_epochs=3, num_prompts_per_step=8)
    state = draft_train(components)
    assert state.step == 3 * (Store.num_samples // 8)
    assert log[-2:] == [f"evaluated{state.step}", "save"]
    assert components.checkpointer.find_resume_point().step == state.step


def test_the_place_in_another_store_is_refused(tmp_path: Path) -> None:
    cfg = config(tmp_path, source="rollouts")
    source = RecordedSamples(Store(), cfg.draft_run, seed=1, batch_size=PER_STEP, max_length=8)
    state = RecordedSamples(Store(), cfg.draft_run, seed=1, batch_size=2, max_length=8).state_dict()
    with pytest.raises(CheckpointError, match="batch_size 2, this run 4"):
        source.load_state_dict(state)


def test_a_recorded_sample_that_is_too_long_is_refused(tmp_path: Path) -> None:
    cfg = config(tmp_path, source="rollouts")
    source = RecordedSamples(Store(), cfg.draft_run, seed=1, batch_size=PER_STEP, max_length=5)
    with pytest.raises(ConfigError, match="max_total_sequence_length: got 5; must be at least the 6 tokens"):
        source.draw(0)


def test_skipped_updates_in_a_row_stop_the_run(tmp_path: Path) -> None:
    components, log = make(tmp_path, max_num_steps=10, grpo={"max_nonfinite_steps": 2})
    components.policy.skipped = 1
    with pytest.raises(NonFiniteError, match="max_nonfinite_steps=2"):
        draft_train(components)
    assert "train1" in log
    assert "train2" not in log


# -- configuration ---------------------------------------------------------------------------------------------------


def test_a_recipe_is_accepted_as_it_is(tmp_path: Path) -> None:
    cfg = config(tmp_path)
    assert draft_run_conflicts(cfg) == []
    assert cfg.draft_run_batch_size == PER_STEP  # one update, though the policy's batch is larger than the step
    smaller = config(tmp_path, draft={"train_global_batch_size": 2})
    assert smaller.draft_run_batch_size == 2


REFUSED = {
    "static": ({"draft": {"static": True, "model_name": "x"}}, "policy.draft.static: got true"),
    "weightless": ({"draft": {"loss_weight": 0.0}}, "policy.draft.loss_weight: got 0"),
    "restart": ({"draft": {"restart": True}}, "policy.draft.restart: got true"),
    "recording": ({"rollout_store": {"mode": "record"}}, "rollout_store.mode: got 'record'"),
    "batch": (
        {"draft": {"train_global_batch_size": 4}, "num_generations_per_prompt": 3, "num_prompts_per_step": 2},
        "policy.draft.train_global_batch_size: got 4; must divide draft_run.num_prompts_per_step x "
        "draft_run.num_generations_per_prompt (2 x 3 = 6)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_leaves_nothing_to_train_is_refused(tmp_path: Path, case: str) -> None:
    settings, message = REFUSED[case]
    problems = draft_run_conflicts(config(tmp_path, **settings))
    assert len(problems) == 1
    assert problems[0].startswith(message)


def test_a_configuration_without_a_draft_is_refused() -> None:
    (problem,) = draft_run_conflicts(build_master_config({"policy": {"model_name": "unused"}}))
    assert problem.startswith("policy.draft.enabled: got false")


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("val:accuracy", None),
        ("train:reward", None),
        ("val:acceptance_length", "val:acceptance_length"),
        ("train:draft_loss", "train:draft_loss"),
    ],
)
def test_checkpoints_are_ranked_by_what_is_measured(tmp_path: Path, name: str, kept: str | None) -> None:
    checkpointing = config(tmp_path).checkpointing.model_copy(update={"metric_name": name})
    assert ranking_of(checkpointing).metric_name == kept
