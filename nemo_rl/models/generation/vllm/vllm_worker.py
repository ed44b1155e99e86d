"""One vLLM engine inside this process, and everything the driver asks of it.

The class needs no Ray: the driver builds it inside an actor, tests build it directly. vllm is imported by `preload` (or
`build`), after the process environment was set.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.errors import RefitError
from nemo_rl.models.generation.interfaces import SamplingCheckReport, ThroughputComparison, UpdateReport
from nemo_rl.models.generation.vllm.draft_extension import install_draft_extension
from nemo_rl.models.generation.vllm.engine_args import (
    SELF_CHECK_TOP_K,
    EngineLimits,
    build_engine_kwargs,
    engine_limits,
    engine_worker_class,
    model_max_positions,
    read_model_config,
)
from nemo_rl.models.generation.vllm.sampling_check import SampledPosition, check_samples
from nemo_rl.models.generation.vllm.spec_metrics import SpecCounters
from nemo_rl.weight_sync.interfaces import RefitManifest, RefitPayload
from nemo_rl.weight_sync.transport import resolve_tensors

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

    from nemo_rl.models.generation.config import GenerationConfig

_CHECK_PROMPT_LENGTH = 8


class VllmGenerationWorker:
    """One engine with its sampling settings, weight version and counters."""

    def __init__(
        self,
        config: GenerationConfig,
        *,
        model_dir: str,
        tokenizer_dir: str,
        device: str,
        seed: int,
    ) -> None:
        """Store the settings; cheap.

        Args:
            config: `policy.generation`.
            model_dir: Directory (or hub id) that the policy starts from.
            tokenizer_dir: Directory (or hub id) of its tokenizer.
            device: "cuda" or "cpu".
            seed: Of the engine and of the sampling check.
        """
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # vLLM puts it above `vllm_cfg.kv_cache_memory_bytes`
        self._config = config
        self._model_dir, self._tokenizer_dir = model_dir, tokenizer_dir
        self._device, self._seed = device, seed
        self._limits = self._limits_for(None)
        self._llm: LLM | None = None
        self._version = -1
        self._poisoned: str | None = None
        self._is_asleep = False
        self._counters = SpecCounters()

    # ------------------------------------------------------------------ life cycle

    def preload(self) -> None:
        """Import vllm and the policy's model class, which takes many seconds; `build` then starts at once."""
        # Deferred: heavy, and must come after the process environment was set.
        from vllm import LLM  # noqa: F401

        from nemo_rl.models.generation.vllm.model_inspection import register_architectures

        importlib.import_module(engine_worker_class(self._device).rpartition(".")[0])
        register_architectures([self._model_dir])

    def build(
        self,
        *,
        speculative_config: dict[str, Any] | None = None,
        trained_draft_tensors: tuple[str, ...] = (),
        frozen_draft_tensors: tuple[str, ...] = (),
        draft_extension: str | None = None,
    ) -> None:
        """Start the engine on the weights of `model_dir`, as version -1.

        Args:
            speculative_config: As `merge_speculative_config` made it; None decodes without speculation.
            trained_draft_tensors: Export names of the draft tensors that each update carries; empty when no draft is
                trained.
            frozen_draft_tensors: Export names of the draft's own tensors that no update carries; they stay as loaded.
            draft_extension: "module:function" that lets vLLM serve the draft; None when it can by itself.
        """
        if self._llm is not None:
            raise RuntimeError("The engine was already built.")
        self._limits = self._limits_for(speculative_config)
        self._llm = self._start_engine(
            speculative_config=speculative_config,
            trained_draft_tensors=tuple(trained_draft_tensors),
            frozen_draft_tensors=tuple(frozen_draft_tensors),
            draft_extension=draft_extension,
        )
        self._llm.update_weight_version(str(self._version))

    @property
    def limits(self) -> EngineLimits:
        """Lengths of the engine and of requests."""
        return self._limits

    def prepare_for_generation(self) -> None:
        """Bring the engine's memory back after `finish_generation`."""
        if self._is_asleep:
            self._engine().wake_up()
            self._is_asleep = False

    def finish_generation(self) -> None:
        """On a shared GPU: move the weights to the host and drop the cache, keeping both models' newest values."""
        if self._device == "cuda" and self._config.colocated.enabled and not self._is_asleep:
            self._engine().sleep(level=1)
            self._is_asleep = True

    def shutdown(self) -> None:
        """Stop the engine. May be called twice."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None

    # ------------------------------------------------------------------ sampling

    def generate(self, data: BatchedDataDict, *, greedy: bool = False) -> BatchedDataDict:
        """Sample one response per row; see `GenerationInterface.generate`."""
        outputs = self._run(self._engine(), data, greedy=greedy)
        for output in outputs:
            metrics = output.outputs[0].spec_decode_metrics
            if metrics is not None:
                self._counters += SpecCounters.from_request(
                    metrics.per_step_accepted,
                    k=metrics.num_spec_tokens,
                    num_draft_tokens=metrics.num_draft_tokens,
                    num_response_tokens=len(output.outputs[0].token_ids),
                )
        return self._collect(data, outputs)

    def spec_counters(self) -> SpecCounters:
        """Cumulative counters of `generate`; checks and probes are not counted."""
        return self._counters

    def sampling_self_check(self) -> SamplingCheckReport:
        """Sample from random prompts and compare with the policy's probabilities; top-p and top-k are off.

        Raises:
            SamplingCheckError: The samples do not fit.
        """
        return check_samples(
            self._sample_for_check(), vocab_size=self._vocab_size(), max_z=self._config.sampling_check.max_z
        )

    def measure_throughput(
        self, data: BatchedDataDict, *, payload: RefitPayload, batch_size: int, repeats: int
    ) -> ThroughputComparison:
        """Time the same prompts with and without speculation on the same weights.

        A second, plain engine is started for this, given the policy of `payload`, and released again. On a GPU it needs
        memory of its own (`policy.generation.vllm_cfg.kv_cache_memory_bytes` bounds its cache).

        Args:
            data: As for `generate`.
            payload: The update that this engine holds.
            batch_size: Sequences decoded together.
            repeats: Timed runs of each kind, in turns, after one untimed run of each.
        """
        if payload.version != self._version:
            raise RefitError(f"measure_throughput: got weights {payload.version}; the engine holds {self._version}.")
        speculative = self._engine()
        plain = self._start_engine(speculative_config=None)
        try:
            self._give_policy(plain, payload)
            rates: dict[str, list[float]] = {"speculative": [], "plain": []}
            for repeat in range(repeats + 1):
                prompts = _with_other_seeds(data, repeat)
                for kind, engine in (("speculative", speculative), ("plain", plain)):
                    rate = self._timed_rate(engine, prompts, batch_size=batch_size)
                    if repeat:
                        rates[kind].append(rate)
        finally:
            release_beside_another(plain)
        return ThroughputComparison(
            speculative=statistics.median(rates["speculative"]),
            plain=statistics.median(rates["plain"]),
            repeats=repeats,
        )

    # ------------------------------------------------------------------ weights

    @property
    def weight_version(self) -> int:
        """Version of the weights that the engine holds."""
        return self._version

    def stage_weights(self, payload: RefitPayload) -> None:
        """Take in a whole update and check it; the engine keeps serving its weights.

        Raises:
            RefitError: The update was refused. Nothing changed.
        """
        engine = self._engine()
        self.prepare_for_generation()
        _send(engine, payload)

    def discard_weights(self) -> None:
        """Drop a staged update, because another engine refused it."""
        self._engine().collective_rpc("discard_weight_update")

    def commit_weights(self, version: int) -> UpdateReport:
        """Apply the staged update, verify it and drop everything cached under the old weights.

        Raises:
            RefitError: Some weights may have changed; from now on this engine refuses to generate.
        """
        engine = self._engine()
        try:
            engine.finish_weight_update(weight_version=str(version))
            results = engine.collective_rpc("refit_result")
            if not engine.reset_prefix_cache():
                raise RefitError("the prefix cache could not be dropped: requests are running.")
        except Exception as err:  # whatever it was, the weights may be half written
            self._poisoned = f"weight update {version} failed after it had begun to write: {err}"
            raise RefitError(
                f"Weight update {version} failed after it had begun to write; the engine is no longer used: {err}"
            ) from err
        self._version = version
        checked = frozenset().union(*(result.checked for result in results))
        unchecked = frozenset().union(*(result.unchecked for result in results)) - checked
        return UpdateReport(version=version, num_checked=len(checked), unchecked=tuple(sorted(unchecked)))

    def update_weights(self, payload: RefitPayload) -> UpdateReport:
        """Stage and commit; for a single engine. See `GenerationInterface.update_weights`."""
        self.stage_weights(payload)
        return self.commit_weights(payload.version)

    # ------------------------------------------------------------------ internals

    def _engine(self) -> LLM:
        if self._poisoned is not None:
            raise RefitError(
                f"This engine must not be used any more: {self._poisoned}. Restart from the last checkpoint."
            )
        if self._llm is None:
            raise RuntimeError("The engine was not built, or was shut down.")
        return self._llm

    def _limits_for(self, speculative_config: dict[str, Any] | None) -> EngineLimits:
        return engine_limits(
            max_model_len=self._config.vllm_cfg.max_model_len,
            model_max_len=model_max_positions(self._model_dir),
            num_speculative_tokens=(speculative_config or {}).get("num_speculative_tokens", 0),
        )

    def _start_engine(
        self,
        *,
        speculative_config: dict[str, Any] | None,
        trained_draft_tensors: tuple[str, ...] = (),
        frozen_draft_tensors: tuple[str, ...] = (),
        draft_extension: str | None = None,
    ) -> LLM:
        # Deferred: vllm is heavy and reads its environment at import.
        from vllm import LLM

        from nemo_rl.models.generation.vllm.model_inspection import register_architectures

        if self._device == "cpu":
            # Deferred like vllm. Before the engine starts, because that is when vLLM scans.
            from nemo_rl.models.generation.vllm import cpu_kernel_scan_fix

            cpu_kernel_scan_fix.install()
        install_draft_extension(draft_extension)
        draft_dir = (speculative_config or {}).get("model")
        register_architectures([self._model_dir, *([draft_dir] if draft_dir else [])])
        kwargs = build_engine_kwargs(
            self._config,
            model_dir=self._model_dir,
            tokenizer_dir=self._tokenizer_dir,
            device=self._device,
            seed=self._seed,
            speculative_config=speculative_config,
            trained_draft_tensors=trained_draft_tensors,
            frozen_draft_tensors=frozen_draft_tensors,
            draft_extension=draft_extension,
            limits=self._limits_for(speculative_config),
        )
        return LLM(**kwargs)

    @functools.cached_property
    def _stop_token_ids(self) -> list[int]:
        """Configured stop tokens, and the end-of-sequence ids of policy and tokenizer."""
        from transformers import AutoTokenizer  # deferred with vllm

        found = set(self._config.stop_token_ids or ())
        generation_config = Path(self._model_dir) / "generation_config.json"
        sources = [read_model_config(self._model_dir)]
        if generation_config.is_file():
            sources.append(json.loads(generation_config.read_text()))
        for source in sources:
            ids = source.get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
        tokenizer: Any = AutoTokenizer.from_pretrained(self._tokenizer_dir)
        if tokenizer.eos_token_id is not None:
            found.add(tokenizer.eos_token_id)
        return sorted(found)

    def _sampling_params(self, **overrides: Any) -> SamplingParams:
        from vllm import SamplingParams  # deferred: heavy

        config = self._config
        values: dict[str, Any] = {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k or 0,
            "stop_token_ids": self._stop_token_ids,
            "stop": list(config.stop_strings or ()) or None,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "detokenize": bool(config.stop_strings),
            "logprobs": 0,  # the sampled token's only
            "flat_logprobs": True,
        }
        return SamplingParams(**{**values, **overrides})

    def _run(self, engine: LLM, data: BatchedDataDict, *, greedy: bool) -> list[RequestOutput]:
        self.prepare_for_generation()
        limit = self._limits.max_total_tokens
        prompts, params = [], []
        for row, length in enumerate(data["input_lengths"].tolist()):
            if not 1 <= length < limit:
                raise ValueError(
                    f"input_lengths[{row}]: got {length}; must be 1 to {limit - 1}, so that one response token fits. "
                    "Drop longer prompts or raise policy.generation.vllm_cfg.max_model_len."
                )
            overrides: dict[str, Any] = {"max_tokens": min(self._config.max_new_tokens, limit - length)}
            if greedy:
                overrides |= {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
            if "seeds" in data:
                overrides["seed"] = int(data["seeds"][row])
            if data.get("stop_strings") is not None and data["stop_strings"][row]:
                if not self._config.stop_strings:
                    raise ValueError(
                        f"stop_strings[{row}]: got {data['stop_strings'][row]!r}; the engine was built without a "
                        "tokenizer. Set policy.generation.stop_strings."
                    )
                overrides["stop"] = [*self._config.stop_strings, *data["stop_strings"][row]]
            prompts.append({"prompt_token_ids": data["input_ids"][row, :length].tolist()})
            params.append(self._sampling_params(**overrides))
        return engine.generate(prompts, params, use_tqdm=False)

    def _collect(self, data: BatchedDataDict, outputs: list[RequestOutput]) -> BatchedDataDict:
        lengths = data["input_lengths"]
        responses = [list(output.outputs[0].token_ids) for output in outputs]
        generated = torch.tensor([len(response) for response in responses], dtype=torch.int64)
        total = lengths + generated
        width = int(total.max())
        ids = torch.zeros(len(responses), width, dtype=torch.int64)
        copied = min(width, data["input_ids"].shape[1])
        ids[:, :copied] = data["input_ids"][:, :copied]
        logprobs = torch.zeros(len(responses), width, dtype=torch.float32)
        for row, (start, end, response) in enumerate(zip(lengths.tolist(), total.tolist(), responses, strict=True)):
            ids[row, start:end] = torch.tensor(response, dtype=torch.int64)
            # Tokens behind a stop string, emitted in the same step, are cut from the tokens but not from these.
            logprobs[row, start:end] = torch.tensor(_sampled_logprobs(outputs[row])[: len(response)])
        return BatchedDataDict(
            {
                "output_ids": ids,
                "generation_lengths": generated,
                "unpadded_sequence_lengths": total,
                "logprobs": logprobs,
                "finish_reasons": [str(output.outputs[0].finish_reason) for output in outputs],
                "weight_versions": torch.tensor([self._version_of(output) for output in outputs], dtype=torch.int64),
            }
        )

    def _version_of(self, output: RequestOutput) -> int:
        """The version the engine itself stamped on an output."""
        spans = output.outputs[0].weight_versions or []
        versions = {int(span.version) for span in spans}
        if len(versions) > 1:
            raise RefitError(f"One response mixes weight versions {sorted(versions)}.")
        return versions.pop() if versions else self._version

    def _vocab_size(self) -> int:
        return self._engine().llm_engine.model_config.get_vocab_size()

    def _sample_for_check(self) -> list[SampledPosition]:
        """Sample from random prompts, then let the engine read the responses and report its raw probabilities.

        Neighbours in the batch differ in temperature (the configured one, or half or double of it) and in length, so
        that the batch changes from step to step: a value given to the wrong request, or left over in memory from the
        step before, then is a wrong one.
        """
        check, vocab_size = self._config.sampling_check, self._vocab_size()
        length = min(_CHECK_PROMPT_LENGTH, self._limits.max_total_tokens - 2)
        # The reading pass needs room for one token more.
        longest = min(check.max_new_tokens, self._limits.max_total_tokens - length - 1)
        generator = torch.Generator().manual_seed(self._seed)
        prompts = torch.randint(vocab_size, (check.num_samples, length), generator=generator).tolist()
        configured = self._config.temperature
        temperatures = [configured, configured / 2 if configured >= 1.0 else configured * 2] * len(prompts)
        self.prepare_for_generation()
        free = {"stop_token_ids": [], "stop": None, "ignore_eos": True}
        sample = [
            self._sampling_params(
                **free,
                temperature=temperatures[index],
                top_p=1.0,
                top_k=0,
                max_tokens=longest - index * 5 % longest,
                seed=self._seed + index,
            )
            for index in range(len(prompts))
        ]
        sampled = self._generate_tokens(prompts, sample)
        texts = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, sampled, strict=True)]
        read = self._sampling_params(
            **free, temperature=0.0, max_tokens=1, prompt_logprobs=min(SELF_CHECK_TOP_K, vocab_size)
        )
        outputs = self._generate_tokens(texts, [read] * len(texts))
        return [
            position
            for output, temperature in zip(outputs, temperatures, strict=False)
            for position in _positions(output, first=length, temperature=temperature)
        ]

    def _generate_tokens(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
        return self._engine().generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    def _give_policy(self, plain: LLM, payload: RefitPayload) -> None:
        """Update a fresh engine of the same policy with the policy's part of an update."""
        arrays, names = resolve_tensors(payload.tensors), payload.manifest.policy
        policy_only = RefitPayload(
            version=payload.version,
            manifest=RefitManifest(policy=names, draft={}),
            checksums={name: payload.checksums[name] for name in names},
            tensors={name: arrays[name] for name in names},
        )
        _send(plain, policy_only)
        plain.finish_weight_update(weight_version=str(payload.version))

    def _timed_rate(self, engine: LLM, data: BatchedDataDict, *, batch_size: int) -> float:
        """Response tokens per second over all rows, `batch_size` at a time."""
        engine.reset_prefix_cache()
        tokens, start = 0, time.perf_counter()
        for first in range(0, data.size, batch_size):
            outputs = self._run(engine, data.slice(first, first + batch_size), greedy=False)
            tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        return tokens / (time.perf_counter() - start)


def _with_other_seeds(data: BatchedDataDict, repeat: int) -> BatchedDataDict:
    """The same prompts, sampled anew: a method that remembers responses must not be timed on ones that it has seen."""
    if "seeds" not in data:
        return data
    return BatchedDataDict({**data, "seeds": data["seeds"] ^ repeat})


def _send(engine: LLM, payload: RefitPayload) -> None:
    """Open a round of the weight transfer and hand over the whole update."""
    engine.start_weight_update()
    engine.update_weights(
        {
            "update_info": {
                "version": payload.version,
                "manifest": payload.manifest,
                "checksums": dict(payload.checksums),
                "source": resolve_tensors(payload.tensors),
            }
        }
    )


def release_beside_another(engine: LLM) -> None:
    """Free an engine while another one lives in this process.

    The engine's own shutdown, which also runs when it is collected, ends the process-wide groups that the other needs.
    """
    client: Any = engine.llm_engine.engine_core  # the in-process client
    client._finalizer.detach()
    client.engine_core.model_executor.shutdown()
    client.engine_core.scheduler.shutdown()


def _sampled_logprobs(output: RequestOutput) -> list[float]:
    """Log-probability of each sampled token; the first entry of each position is the sampled token's."""
    flat: Any = output.outputs[0].logprobs  # FlatLogprobs, as asked for
    return [flat.logprobs[start] for start in flat.start_indices]


def _positions(output: RequestOutput, *, first: int, temperature: float) -> list[SampledPosition]:
    """Prompt tokens from index `first` on, with the most likely tokens of each position."""
    flat: Any = output.prompt_logprobs  # FlatLogprobs, as asked for
    tokens = output.prompt_token_ids or []
    found = []
    for index in range(first, len(tokens)):
        # vLLM puts the prompt's own token first, then the k most likely.
        span = range(flat.start_indices[index] + 1, flat.end_indices[index])
        found.append(SampledPosition(tokens[index], {flat.token_ids[i]: flat.logprobs[i] for i in span}, temperature))
    return found
