"""`--dry-run`: everything about a run that can be known without starting it, checked and shown.

The checks are those of a real start (`nemo_rl.utils.preflight`), so a broken configuration gives the same messages.
What cannot be looked at on this machine is left out, and the output says what that was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_rl.algorithms.config import ALGORITHM
from nemo_rl.utils.memory_estimate import (
    BYTES,
    DraftMemory,
    EngineMemory,
    TrainingMemory,
    draft_memory,
    engine_memory,
    model_sizes,
    training_memory,
)
from nemo_rl.utils.preflight import PreflightResult, preflight

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import MasterConfig
    from nemo_rl.models.automodel.draft.spec import DraftSpec

__all__ = ["DryRun", "dry_run", "print_dry_run"]

GIB = 1 << 30
GPU_GIB = (80, 141)
"""Memory of the GPUs for which the size of the engine's cache is shown."""
LOG_WIDTH = 120

Row = tuple[str, str]


@dataclass(frozen=True)
class DryRun:
    """What a start of this configuration would do.

    Attributes:
        cfg: The configuration.
        checked: What the checks found.
        left_out: What they could not look at, one sentence each.
        policy_parameters: None when the policy's config.json is not here or has no size to count by.
        training: None as above.
        draft: None as above, and without a draft.
        engine: None as above.
    """

    cfg: MasterConfig
    checked: PreflightResult
    left_out: tuple[str, ...]
    policy_parameters: int | None
    training: TrainingMemory | None
    draft: DraftMemory | None
    engine: EngineMemory | None


def dry_run(cfg: MasterConfig, *, algorithm: str = ALGORITHM) -> DryRun:
    """Check a configuration as a start would, and estimate what it needs.

    Args:
        cfg: A valid configuration.
        algorithm: See `nemo_rl.utils.preflight.preflight`.

    Raises:
        ConfigError: With the messages of a real start.
    """
    left_out: list[str] = []
    checked = preflight(cfg, algorithm=algorithm, left_out=left_out)
    sizes, spec, device = model_sizes(checked.policy_config), checked.draft_spec, checked.device
    if sizes is None:
        left_out.append("memory: the policy's config.json is not here or lacks a size; there is no estimate.")
        return DryRun(cfg, checked, tuple(left_out), None, None, None, None)
    draft = None if spec is None else draft_memory(cfg, spec, device=device)
    return DryRun(
        cfg,
        checked,
        tuple(left_out),
        policy_parameters=sizes.parameters,
        training=training_memory(cfg, sizes, device=device),
        draft=draft,
        engine=engine_memory(
            cfg, sizes, spec=spec, draft_parameters=0 if draft is None else draft.parameters, device=device
        ),
    )


def print_dry_run(run: DryRun, console: Console | None = None) -> None:
    """Show it.

    Args:
        run: What `dry_run` found.
        console: Where to; None = the terminal, or standard output at a width that keeps lines whole.
    """
    if console is None:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = LOG_WIDTH
    sections = {
        "Layout": _layout(run),
        "Schedule": _schedule(run.cfg),
        "Draft": _draft(run),
        f"Memory of one {'GPU' if run.checked.device == 'cuda' else 'worker'}, estimated": _memory(run),
    }
    for title, rows in sections.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(name, Text(value))
        console.print(table)
        console.print()
    for sentence in run.left_out:
        console.print(Text(f"left out: {sentence}", style="yellow"))
    console.print(Text("The configuration is valid; nothing was started.", style="green"))


def _layout(run: DryRun) -> Iterator[Row]:
    cfg, device = run.cfg, run.checked.device
    policy, dtensor, vllm = cfg.policy, cfg.policy.dtensor_cfg, cfg.policy.generation.vllm_cfg
    workers, engines = cfg.num_policy_workers(device), cfg.num_generation_engines(device)
    parameters = "" if run.policy_parameters is None else f", {_millions(run.policy_parameters)} parameters"
    yield "policy", f"{policy.model_name}{parameters}, {policy.precision}, fp32 master weights"
    nodes = f"{cfg.cluster.num_nodes} x {cfg.cluster.gpus_per_node} GPUs" if device == "cuda" else "CPU"
    yield "device", nodes
    yield (
        "training",
        f"{workers} ranks = {cfg.policy_data_parallel_size(device)} data parallel x {dtensor.tensor_parallel_size} "
        f"tensor parallel; experts over {dtensor.expert_parallel_size}"
        f"{', activations recomputed' if dtensor.activation_checkpointing else ''}",
    )
    per_engine = vllm.tensor_parallel_size * vllm.pipeline_parallel_size
    where = "on the devices of training" if policy.generation.colocated.enabled else "on devices of their own"
    each = f" of {per_engine} GPU{'s' if per_engine > 1 else ''}" if device == "cuda" else ""
    yield "generation", f"{engines} engine{'s' if engines > 1 else ''}{each}, {where}"
    yield from _batches(run)


def _batches(run: DryRun) -> Iterator[Row]:
    cfg, policy = run.cfg, run.cfg.policy
    ranks = cfg.policy_data_parallel_size(run.checked.device)
    per_rank = policy.train_global_batch_size // ranks
    yield (
        "rollout batch",
        f"{cfg.grpo.num_prompts_per_step} prompts x {cfg.grpo.num_generations_per_prompt} responses = "
        f"{cfg.rollout_batch_size} samples",
    )
    updates = cfg.rollout_batch_size // policy.train_global_batch_size
    yield "updates per step", f"{updates} of {policy.train_global_batch_size} samples, {per_rank} per rank"
    blocks = {"packed rows": policy.sequence_packing, "micro-batches by tokens": policy.dynamic_batching}
    for name, block in blocks.items():
        if block.enabled:
            most = -(-per_rank * policy.max_total_sequence_length // block.train_mb_tokens)
            yield (
                "micro-batches",
                f"{name} of up to {block.train_mb_tokens} tokens, at most about {most} per rank and update",
            )
            return
    micro = policy.train_micro_batch_size
    yield "micro-batches", f"{-(-per_rank // micro)} of {micro} samples per rank and update"


def _schedule(cfg: MasterConfig) -> Iterator[Row]:
    grpo, ckpt = cfg.grpo, cfg.checkpointing
    passes = "one pass" if grpo.max_num_epochs == 1 else f"{grpo.max_num_epochs} passes"
    yield "steps", f"at most {grpo.max_num_steps}, and {passes} over the prompts"
    yield (
        "lengths",
        f"prompts up to {cfg.data.max_input_seq_length} tokens, responses up to "
        f"{cfg.policy.generation.max_new_tokens}, together up to {cfg.policy.max_total_sequence_length}",
    )
    yield "validation", f"every {grpo.val_period} steps" if grpo.val_period else "none by steps"
    saved = f"every {ckpt.save_period} steps into {ckpt.checkpoint_dir}" if ckpt.enabled else "none"
    yield "checkpoints", saved


def _draft(run: DryRun) -> Iterator[Row]:
    cfg, spec = run.cfg, run.checked.draft_spec
    generation = cfg.policy.generation
    if spec is None and cfg.policy.draft_enabled:
        yield "draft", f"{cfg.policy.draft.model_name}, not looked at (see below)"
        return
    if spec is None:
        user = generation.speculative_config
        yield "draft", "none"
        yield "speculation", "none" if user is None else f"{user.get('method')}, K = {user['num_speculative_tokens']}"
        return
    arch = spec.architecture
    yield "draft", f"{cfg.policy.draft.model_name or 'new'}: {spec.describe()}"
    yield "positions", f"{arch.max_position_embeddings}; the engine's sequences have up to {spec.max_model_len}"
    yield "trained", _tensors("nothing: it stays as it is", () if spec.is_static else spec.trained_names, spec)
    if not spec.is_static:
        batch = cfg.policy.draft.train_global_batch_size or cfg.policy.train_global_batch_size
        yield "updates per policy update", f"{cfg.policy.train_global_batch_size // batch} of {batch} samples"
    yield "sent with every refit", _tensors("nothing", spec.published_names, spec)
    if spec.serving is not None:
        yield "loaded once by the engine", _tensors("nothing", spec.kept_names(spec.published_names), spec)
    shared = sorted(arch.ignored_shapes())
    yield "the policy's own", ", ".join(shared) or "nothing: embedding and head are the draft's"
    served = spec.speculative_config(model_dir="the exported draft")
    yield "served", "no" if served is None else ", ".join(f"{name}: {value}" for name, value in served.items())


def _tensors(nothing: str, names: Iterable[str], spec: DraftSpec) -> str:
    """How many tensors and parameters, and the parts of the draft that they belong to."""
    shapes = {**spec.architecture.frozen_shapes(), **spec.architecture.published_shapes()}
    names = list(names)
    if not names:
        return nothing
    parts = dict.fromkeys(name.removesuffix(".weight").split(".")[0] for name in names)
    total = sum(prod(shapes[name]) for name in names)
    return f"{len(names)} tensors, {_millions(total)} numbers: {', '.join(parts)}"


def _memory(run: DryRun) -> Iterator[Row]:
    training, draft, engine = run.training, run.draft, run.engine
    if training is None or engine is None:
        yield "estimate", "none (see below)"
        return
    yield "weights, fp32", _gib(training.weights)
    yield "gradients, fp32", _gib(training.gradients)
    yield "optimizer", _gib(training.optimizer)
    yield "gathered layers", _gib(training.gathered)
    yield f"activations of {training.micro_batch_tokens} tokens", _gib(training.activations)
    yield "logits", _gib(training.logits)
    total = training.total
    if draft is not None:
        yield (
            "draft",
            f"{_gib(draft.total)} = state {_gib(draft.state)}, features {_gib(draft.features)}, activations "
            f"{_gib(draft.activations)}, logits {_gib(draft.logits)}",
        )
        total += draft.total
    yield "training, together", _gib(total)
    yield from _engine(run, engine)


def _engine(run: DryRun, engine: EngineMemory) -> Iterator[Row]:
    vllm = run.cfg.policy.generation.vllm_cfg
    yield "engine, weights", f"{_gib(engine.weights)} in {vllm.precision} ({BYTES[vllm.precision]} bytes)"
    yield (
        "engine, cache",
        f"{engine.kv_bytes_per_token / 1024:.1f} KiB per token, {_gib(engine.sequence)} per sequence of "
        f"{vllm.max_model_len} tokens",
    )
    if engine.utilization is None:
        yield "engine, holds", f"{engine.sequences(0)} sequences of full length in {_gib(engine.cache or 0)}"
        return
    colocated = run.cfg.policy.generation.colocated.enabled
    turns = "; training and engine take turns" if colocated else ""
    yield "engine, share", f"{engine.utilization:.0%} of the GPU (gpu_memory_utilization){turns}"
    for size in GPU_GIB:
        yield f"engine on {size} GiB", f"{engine.sequences(size * GIB)} sequences of full length at once"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"
