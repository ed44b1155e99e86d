"""Evaluation over an in-memory engine: pass@k against all subsets, what is timed and counted, and its configuration."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples import run_eval
from nemo_rl.algorithms import evaluation
from nemo_rl.algorithms.config import MasterConfig
from nemo_rl.algorithms.evaluation import Evaluation, evaluate, pass_at_k, reported_ks, validation_examples
from nemo_rl.algorithms.evaluation_config import evaluation_tree, modes_of
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentReturn
from nemo_rl.errors import ConfigError
from nemo_rl.models.generation.vllm.spec_metrics import SpecCounters
from nemo_rl.utils.config import build_master_config, load_config
from tests.model_stubs import ROOT

RECIPES = ROOT / "examples/configs/recipes/llm"
SPEC = "policy.generation.vllm_kwargs.speculative_config"


# --- pass@k


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations(range(n), k))
        hits = sum(any(i < c for i in subset) for subset in subsets)
        assert pass_at_k(n, c, k) == pytest.approx(hits / len(subsets), abs=1e-12)


def test_pass_at_k_is_unbiased() -> None:
    """Its mean over draws of n completions is the probability that k fresh ones hold a correct one."""
    p, n, k = 0.3, 5, 3
    mean = 0.0
    for outcome in itertools.product((0, 1), repeat=n):
        c = sum(outcome)
        mean += p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k)
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_pass_at_k_of_many_completions_is_finite() -> None:
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_pass_at_k_of_impossible_counts(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(("n", "ks"), [(1, [1]), (2, [1, 2]), (8, [1, 2, 4, 8]), (10, [1, 2, 4, 8, 10])])
def test_reported_ks(n: int, ks: list[int]) -> None:
    assert reported_ks(n) == ks


# --- a round


@dataclasses.dataclass(frozen=True)
class Prompt:
    prompt_ids: list[int]
    prompt_text: str
    metadata: dict[str, Any]
    too_long: bool = False


class Engine:
    """Answers the i-th completion of a call with the i-th given answer; takes two seconds per call."""

    def __init__(self, answers: list[int]) -> None:
        self.answers, self.now, self.drafts, self.seeds = list(answers), 0.0, 5, []

    def clock(self) -> float:
        return self.now

    def generate(self, data: BatchedDataDict, *, greedy: bool = False) -> BatchedDataDict:
        assert not greedy
        n, width = data["input_ids"].shape
        self.now += 2.0
        self.drafts += n
        self.seeds += data["seeds"].tolist()
        taken = torch.tensor([[self.answers.pop(0)] for _ in range(n)])
        return BatchedDataDict(
            {
                "output_ids": torch.cat([data["input_ids"], taken, taken, taken], 1),
                "generation_lengths": torch.full((n,), 3),
                "unpadded_sequence_lengths": torch.full((n,), width + 3),
                "logprobs": torch.full((n, width + 3), -0.5),
                "finish_reasons": ["stop"] * n,
                "weight_versions": torch.full((n,), -1),
            }
        )

    def spec_counters(self) -> SpecCounters:
        return SpecCounters(self.drafts, 3 * self.drafts, 2 * self.drafts, (self.drafts, self.drafts, 0))


class IsOne:
    """Reward 1 for the answer 1; scoring takes long, and is no generation."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def step(self, responses: list[str], metadata: list[dict[str, Any]]) -> EnvironmentReturn:
        self._engine.now += 100.0
        return EnvironmentReturn([float(text.startswith("1 ")) for text in responses], list(responses), {})


def config(**grpo: Any) -> MasterConfig:
    settings = {"val_batch_size": 2, "val_num_generations_per_prompt": 4} | grpo
    return build_master_config({"policy": {"model_name": "unused"}, "grpo": settings})


def run(answers: list[int], num_prompts: int) -> tuple[Evaluation, Engine]:
    engine = Engine(answers)
    prompts = [Prompt([7, 8], f"q{i}", {"index": i}) for i in range(num_prompts)]
    result = evaluate(
        engine,
        IsOne(engine),
        SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids))),
        prompts,
        config(),
        mode="speculative",
        pad_token_id=0,
        clock=engine.clock,
    )
    return result, engine


def test_round() -> None:
    # Correct completions per prompt: 1, 0, 4 of 4.
    result, engine = run([1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1], num_prompts=3)
    got = result.metrics
    assert got["accuracy"] == pytest.approx(5 / 12)
    assert got["pass@1"] == pytest.approx(5 / 12)
    assert got["pass@2"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert got["pass@4"] == pytest.approx((1 + 0 + 1) / 3)
    assert "pass_k" not in got
    # Two calls of two seconds; the environment's time is no generation time.
    assert got["seconds"] == 4.0
    assert got["tokens_per_sec"] == pytest.approx(12 * 3 / 4.0)
    # Two of three proposed tokens of every draft, counted from the round's start.
    assert got["spec_num_drafts"] == 12
    assert got["spec_acceptance_length"] == pytest.approx(3.0)
    assert len(set(engine.seeds)) == 12, "every completion has a seed of its own"


def test_both_ways_of_decoding_get_the_same_prompts_and_seeds() -> None:
    assert run([0] * 12, 3)[1].seeds == run([1] * 12, 3)[1].seeds


def test_prompts_of_a_round() -> None:
    prompts = [Prompt([1], f"q{i}", {}, too_long=i % 2 == 0) for i in range(20)]
    chosen = validation_examples(prompts, config(max_val_samples=3))
    assert [prompt.prompt_text for prompt in chosen] == ["q1", "q3", "q5"]


@pytest.mark.parametrize("prompts", [None, [], [Prompt([1], "q", {}, too_long=True)]])
def test_no_prompts(prompts: list[Prompt] | None) -> None:
    with pytest.raises(ConfigError, match=r"data.dataset_name: got 'OpenMathInstruct-2', which gives no validation"):
        validation_examples(prompts, config())


# --- configuration


def evaluation_config(recipe: str, *overrides: str) -> MasterConfig:
    return build_master_config(evaluation_tree(load_config(RECIPES / f"{recipe}.yaml", overrides)))


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_can_be_evaluated(path: Path) -> None:
    cfg = build_master_config(evaluation_tree(load_config(path)))
    assert not cfg.checkpointing.enabled
    if cfg.policy.draft_enabled:
        assert cfg.policy.draft.static
        assert cfg.policy.draft_served


def test_a_draft_is_served_as_it_is_with_its_settings() -> None:
    overrides = ["policy.draft.warmup_steps=3", "policy.draft.loss_weight=0.5", "policy.draft.freeze=[fc]"]
    cfg = evaluation_config("grpo-qwen3-8b-1n8g-automodel-peagle", *overrides)
    assert cfg.policy.draft.algo == "peagle"
    assert cfg.policy.draft.num_depths == 8
    assert cfg.policy.draft.warmup_steps == 0
    assert cfg.policy.generation.num_speculative_tokens == 5
    assert modes_of(cfg, only=None) == ["plain", "speculative"]
    assert modes_of(cfg, only="plain") == ["plain"]


def test_a_new_draft_has_nothing_to_serve() -> None:
    cfg = evaluation_config("grpo-tiny-qwen3-1n0g-automodel-dflash")
    assert not cfg.policy.draft_enabled
    assert modes_of(cfg, only=None) == ["plain"]
    with pytest.raises(ConfigError, match=r"--only: got speculative; must be plain"):
        modes_of(cfg, only="speculative")


def test_lookup_needs_no_draft() -> None:
    assert modes_of(evaluation_config("grpo-tiny-qwen3-1n0g-automodel-ngram"), only=None) == ["plain", "speculative"]


def test_the_given_tree_stays_as_it_is() -> None:
    tree = load_config(RECIPES / "grpo-tiny-qwen3-1n0g-automodel-eagle3.yaml")
    before = str(tree)
    evaluation_tree(tree)
    assert str(tree) == before


# --- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["policy.model_name=/no/such"], "error: policy.model_name: got '/no/such'; must be an existing directory"),
        (["grpo.max_val_samples=0"], "error: grpo.max_val_samples: got 0"),
        (["--only", "speculative"], "error: --only: got speculative; must be plain"),
        (["--output", "/proc/x/y.json"], "error: --output: got '/proc/x'"),
    ],
)
def test_bad_input_ends_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = RECIPES / "grpo-tiny-qwen3-1n0g-automodel-none.yaml"
    assert run_eval.main(["--config", str(recipe), *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_what_the_command_shows_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [
        Evaluation("plain", {"pass@1": 0.25, "tokens_per_sec": 100.0}, [("q ", "a", 1.0)]),
        Evaluation("speculative", {"pass@1": 0.5, "tokens_per_sec": 150.0, "spec_acceptance_length": 2.5}, []),
    ]
    seen: dict[str, Any] = {}

    def fake(cfg: MasterConfig, checked: Any, *, modes: list[str], on_status: Any) -> list[Evaluation]:
        seen.update(modes=modes, static=cfg.policy.draft.static)
        return results

    monkeypatch.setattr("nemo_rl.utils.preflight.preflight", lambda cfg: None)
    monkeypatch.setattr(evaluation, "run_evaluation", fake)
    recipe, output = RECIPES / "grpo-qwen3-8b-1n8g-automodel-eagle3.yaml", tmp_path / "out" / "eval.json"
    output.parent.mkdir()
    assert run_eval.main(["--config", str(recipe), "--output", str(output)]) == 0
    assert seen == {"modes": ["plain", "speculative"], "static": True}
    out = capsys.readouterr().out
    assert "q a" in out
    assert "speculation: 1.50 times the tokens per second" in out
    row = next(line for line in out.splitlines() if "spec_acceptance_length" in line)
    assert row.split("│")[2].strip() == ""
    assert row.split("│")[3].strip() == "2.5"
    assert '"spec_acceptance_length": 2.5' in output.read_text()
