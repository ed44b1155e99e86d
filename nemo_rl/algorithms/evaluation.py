"""Evaluation of a checkpoint: pass@k, tokens per second and acceptance, with speculation and without.

It is a validation round (`validation.py`) on engines that serve the checkpoint as it is: no trainer, no refit. Which
prompts, how many and how they are sampled is what the configuration says for validation.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from nemo_rl.algorithms.evaluation_config import SPECULATIVE
from nemo_rl.algorithms.validation import validate
from nemo_rl.errors import ConfigError
from nemo_rl.models.generation.vllm.speculative import merge_speculative_config
from nemo_rl.utils.served_draft import directory_with_positions

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import MasterConfig
    from nemo_rl.data.datasets import PromptExample
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.environments.interfaces import EnvironmentInterface
    from nemo_rl.experience.rollouts import Decoder
    from nemo_rl.models.generation.interfaces import GenerationInterface
    from nemo_rl.models.generation.vllm.spec_metrics import SpecCounters
    from nemo_rl.utils.preflight import PreflightResult

__all__ = ["Evaluation", "evaluate", "pass_at_k", "reported_ks", "run_evaluation", "validation_examples"]

SERVED_DRAFT_DIR = "evaluated_draft"
"""Under the log directory: links to a draft whose config.json names too few positions."""


class Evaluation(NamedTuple):
    """What one way of decoding gave."""

    mode: str
    """`plain` or `speculative`."""

    metrics: dict[str, float]
    """Those of `validate`, ``pass@k`` for several k, ``tokens_per_sec`` and ``seconds`` of generation."""

    samples: list[tuple[str, str, float]]
    """``(prompt, response, reward)`` of the first prompts."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that k of the completions of a prompt, drawn without replacement, hold a correct one.

    Unbiased for the probability that k fresh completions do; the share of prompts with a correct one among the first k
    has the same mean and more noise.

    Args:
        num_samples: Completions n of the prompt.
        num_correct: Those that are correct, c.
        k: At most n.

    Returns:
        1 - C(n - c, k) / C(n, k).
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} correct completions among {num_samples}")
    missed = 1.0
    # C(n - c, k) / C(n, k) as a product: no large numbers.
    for i in range(k):
        missed *= max(0, num_samples - num_correct - i) / (num_samples - i)
    return 1.0 - missed


def reported_ks(num_samples: int) -> list[int]:
    """1, 2, 4, ... up to the number of completions, and that number."""
    powers = itertools.takewhile(lambda k: k < num_samples, (1 << i for i in itertools.count()))
    return [*powers, num_samples]


class _Timed:
    """The two calls that a validation round makes, with a stopwatch on one of them."""

    def __init__(self, generation: GenerationInterface, clock: Callable[[], float]) -> None:
        self._generation, self._clock = generation, clock
        self.seconds, self.tokens = 0.0, 0

    def generate(self, data: BatchedDataDict, *, greedy: bool = False) -> BatchedDataDict:
        start = self._clock()
        out = self._generation.generate(data, greedy=greedy)
        self.seconds += self._clock() - start
        self.tokens += int(out["generation_lengths"].sum())
        return out

    def spec_counters(self) -> SpecCounters:
        return self._generation.spec_counters()


def evaluate(
    generation: GenerationInterface,
    environment: EnvironmentInterface,
    tokenizer: Decoder,
    examples: list[PromptExample],
    cfg: MasterConfig,
    *,
    mode: str,
    pad_token_id: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Evaluation:
    """Evaluate the weights that the engines hold.

    Args:
        generation: The engines.
        environment: Scores responses.
        tokenizer: Decodes them.
        examples: Prompts that fit the engines.
        cfg: The configuration; `grpo.val_*` says how many completions and how many prompts at once.
        mode: Recorded.
        pad_token_id: Fills the right side of prompts.
        clock: Seconds.
    """
    timed = _Timed(generation, clock)
    n = cfg.grpo.val_num_generations_per_prompt
    result = validate(
        # The two methods that a validation round calls.
        cast("GenerationInterface", timed),
        environment,
        tokenizer,
        examples,
        step=0,
        seed=cfg.grpo.seed,
        batch_size=cfg.grpo.val_batch_size,
        num_generations=n,
        pad_token_id=pad_token_id,
        num_samples_to_keep=cfg.logger.num_val_samples_to_print,
    )
    metrics = {name: value for name, value in result.metrics.items() if name != "pass_k"}
    for k in reported_ks(n):
        metrics[f"pass@{k}"] = sum(pass_at_k(n, c, k) for c in result.num_correct) / len(result.num_correct)
    metrics["seconds"] = timed.seconds
    metrics["tokens_per_sec"] = timed.tokens / max(timed.seconds, 1e-9)
    return Evaluation(mode, metrics, result.samples)


def run_evaluation(
    cfg: MasterConfig, checked: PreflightResult, *, modes: Sequence[str], on_status: Callable[[str], None]
) -> list[Evaluation]:
    """Start engines for each way of decoding in turn, on the same prompts and seeds.

    Args:
        cfg: The configuration, from `evaluation_tree`.
        checked: What preflight found.
        modes: From `modes_of`.
        on_status: Told what is being done.

    Returns:
        One result per mode.
    """
    # Imported here: `--help` and a wrong configuration do not wait for Ray and transformers.
    from nemo_rl.algorithms.run_setup import build_clusters, pad_token_of
    from nemo_rl.data.datasets import build_datasets
    from nemo_rl.data.tokenizer import load_tokenizer
    from nemo_rl.distributed.ray_runtime import init_ray, shutdown_ray
    from nemo_rl.environments.registry import create_environment

    tokenizer = load_tokenizer(cfg.policy.tokenizer)
    _, prompts = build_datasets(
        cfg.data, cfg.env, tokenizer, max_input_len=cfg.data.max_input_seq_length, seed=cfg.grpo.seed
    )
    examples = validation_examples(prompts, cfg)
    with ExitStack() as stack:
        on_status("starting Ray")
        init_ray(cfg.cluster, log_dir=Path(cfg.logger.log_dir))
        stack.callback(shutdown_ray)
        environment = create_environment(cfg.env)
        stack.callback(environment.shutdown)
        evaluate_one = functools.partial(
            evaluate,
            environment=environment,
            tokenizer=cast("Decoder", tokenizer),
            examples=examples,
            cfg=cfg,
            pad_token_id=pad_token_of(tokenizer),
        )
        results = []
        for mode in modes:
            with ExitStack() as engines:
                policy_cluster, cluster = build_clusters(cfg, device=checked.device)
                engines.callback(policy_cluster.shutdown)
                engines.callback(cluster.shutdown)
                on_status(f"starting the engines ({mode})")
                generation = _start_engines(cfg, checked, cluster, is_speculative=mode == SPECULATIVE, stack=engines)
                on_status(f"{len(examples)} prompts x {cfg.grpo.val_num_generations_per_prompt} completions ({mode})")
                results.append(evaluate_one(generation, mode=mode))
        return results


def validation_examples(prompts: Iterable[PromptExample] | None, cfg: MasterConfig) -> list[PromptExample]:
    """The prompts of a validation round.

    Args:
        prompts: Held-out prompts; None = the data set has none.
        cfg: The configuration.

    Raises:
        ConfigError: There are none.
    """
    examples = [] if prompts is None else (example for example in prompts if not example.too_long)
    chosen = list(itertools.islice(examples, cfg.grpo.max_val_samples))
    if not chosen:
        raise ConfigError(
            f"data.dataset_name: got {cfg.data.dataset_name!r}, which gives no validation prompts of at most "
            f"data.max_input_seq_length ({cfg.data.max_input_seq_length}) tokens. Set data.val_data_path, or take "
            "another data set."
        )
    return chosen


def _start_engines(
    cfg: MasterConfig, checked: PreflightResult, cluster: Any, *, is_speculative: bool, stack: ExitStack
) -> GenerationInterface:
    from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration

    generation = VllmGeneration(cluster, cfg, model_dir=checked.model_dir, device=checked.device)
    stack.callback(generation.shutdown)
    if not is_speculative:
        generation.build()
        return generation
    draft, required, own = checked.draft_spec, None, ()
    if draft is not None and checked.draft_dir is not None:
        served = directory_with_positions(
            Path(checked.draft_dir),
            draft.architecture.max_position_embeddings,
            target=(Path(cfg.logger.log_dir) / SERVED_DRAFT_DIR).absolute(),
        )
        required = draft.speculative_config(model_dir=str(served))
        own = draft.kept_names(())
    generation.build(
        speculative_config=merge_speculative_config(cfg.policy.generation.speculative_config, required),
        frozen_draft_tensors=own,
        draft_extension=None if draft is None else draft.serving_extension,
    )
    return generation
