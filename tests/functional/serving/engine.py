"""A live engine that serves a draft of ours, for the tests of this directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read when vllm is imported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.config import GenerationConfig, SamplingCheckConfig, VllmConfig
from nemo_rl.models.generation.vllm.spec_metrics import SpecCounters
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorker
from nemo_rl.weight_sync.checksum import dtype_name, tensor_checksum
from nemo_rl.weight_sync.interfaces import DRAFT_PREFIX, RefitManifest, RefitPayload, TensorInfo
from nemo_rl.weight_sync.transport import pack_tensors

MAX_LEN = 96


@dataclass(frozen=True)
class Proposal:
    """`draft` was proposed after `context` had been verified and `sampled` had been sampled."""

    context: list[int]
    sampled: int
    draft: list[int]


def draw_weights(module: torch.nn.Module, *, seed: int) -> None:
    """Draw every tensor of a draft anew; norms around one, because an identity norm hides its absence."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            is_vector = p.ndim == 1 and not name.endswith("bias")
            p.copy_(1 + 0.3 * noise if is_vector else noise * 2 * p.shape[-1] ** -0.5)


class ServedDraft:
    """An engine with a draft, started on what the draft's runtime exports."""

    def __init__(
        self,
        policy_dir: Path,
        policy: torch.nn.Module,
        runtime: Any,
        draft_dir: Path,
        *,
        new_tokens: int,
        layout: str = "native",
        is_self_describing: bool = False,
    ) -> None:
        """Export a draft and start the engine.

        Args:
            policy_dir: of the policy.
            policy: the policy.
            runtime: of the draft.
            draft_dir: where it is exported to.
            new_tokens: longest response.
            layout: of the export.
            is_self_describing: give the engine the draft's directory as its model and nothing else; the policy's
                directory, the method and K are then what the export says.
        """
        runtime.export(str(draft_dir), policy, layout=layout)
        config = GenerationConfig(
            max_new_tokens=new_tokens,
            vllm_cfg=VllmConfig(precision="float32", max_model_len=MAX_LEN, enforce_eager=True),
            sampling_check=SamplingCheckConfig(),
        )
        model_dir = str(draft_dir if is_self_describing else policy_dir)
        self.worker = VllmGenerationWorker(
            config, model_dir=model_dir, tokenizer_dir=str(policy_dir), device="cpu", seed=0
        )
        required = None if is_self_describing else runtime.spec.speculative_config(model_dir=str(draft_dir))
        self.worker.build(
            speculative_config=required,
            trained_draft_tensors=runtime.spec.published_names,
            draft_extension=runtime.spec.serving_extension,
        )
        self.version = -1

    def refit(self, runtime: Any, policy: torch.nn.Module) -> None:
        """Publish policy and draft as a training step does."""
        target = {name: p.detach().clone() for name, p in policy.named_parameters()}
        draft = {name.removeprefix(DRAFT_PREFIX): t for name, t in runtime.stream(policy)}
        wire = {**target, **{DRAFT_PREFIX + name: t for name, t in draft.items()}}

        def describe(tensors: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
            return {name: TensorInfo(tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items()}

        self.version += 1
        report = self.worker.update_weights(
            RefitPayload(
                version=self.version,
                manifest=RefitManifest(policy=describe(target), draft=describe(draft)),
                checksums={name: tensor_checksum(t) for name, t in wire.items()},
                tensors=pack_tensors(wire.items()),
            )
        )
        assert report.num_checked == len(wire)

    def generate(self, prompts: list[list[int]], *, greedy: bool) -> tuple[list[list[int]], SpecCounters]:
        """Whole sequences of prompts, and what the engine counted meanwhile."""
        width = max(map(len, prompts))
        data = BatchedDataDict(
            {
                "input_ids": torch.tensor([p + [0] * (width - len(p)) for p in prompts]),
                "input_lengths": torch.tensor([len(p) for p in prompts]),
                "seeds": torch.arange(len(prompts)),
            }
        )
        before = self.worker.spec_counters()
        out = self.worker.generate(data, greedy=greedy)
        tokens = [
            row[:length].tolist()
            for row, length in zip(out["output_ids"], out["unpadded_sequence_lengths"].tolist(), strict=True)
        ]
        return tokens, self.worker.spec_counters() - before

    @contextmanager
    def cut_prompts(self, budget: int) -> Iterator[None]:
        """Let the engine compute at most so many tokens per step, so that longer prompts are computed in parts."""
        scheduler = self.worker._llm.llm_engine.engine_core.engine_core.scheduler
        whole, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, budget
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens = whole

    def proposals(self, prompts: list[list[int]]) -> list[Proposal]:
        """What is drafted while decoding greedily, one prompt at a time."""
        drafter = self.worker._llm.collective_rpc(lambda worker: worker.model_runner.drafter)[0]
        stock: Callable[..., torch.Tensor] = drafter.propose
        recorded: list[tuple[int, int, list[int]]] = []

        def propose(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = stock(*args, **kwargs)
            at = kwargs["token_indices_to_sample"]
            row = -1 if at is None else int(at[0])
            verified = int(kwargs["target_positions"][row]) + 1
            recorded.append((verified, int(kwargs["next_token_ids"][0]), out[0].tolist()))
            return out

        found = []
        drafter.propose = propose
        try:
            for prompt in prompts:
                recorded.clear()
                tokens = self.generate([prompt], greedy=True)[0][0]
                for verified, sampled, draft in recorded:
                    if verified < len(tokens):
                        assert tokens[verified] == sampled
                        found.append(Proposal(tokens[:verified], sampled, draft))
        finally:
            drafter.propose = stock
        return found
