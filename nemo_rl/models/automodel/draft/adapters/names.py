"""Tensor names of every publisher -> one set of names, and whether a set of tensors is the draft that it says it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from nemo_rl.errors import CheckpointError
from nemo_rl.models.automodel.draft.architecture import DraftArchitecture

__all__ = ["NormalizedNames", "check_tensor_shapes", "check_zeros", "normalize_names"]


@dataclass(frozen=True)
class NormalizedNames:
    """Tensor names of a checkpoint in canonical form.

    Attributes:
        canonical: canonical name to name as stored.
        dropped: names as stored that are derived or belong to the target.
    """

    canonical: Mapping[str, str]
    dropped: tuple[str, ...] = field(default=())


_WRAPPER_PREFIXES = ("draft.", "module.", "eagle_module.", "model.")
_NESTED_HEAD = tuple(f"logit_head.{part}." for part in ("prefix_gru", "embed_proj", "markov_head", "confidence_head"))
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)
_TARGET_OWNED = ("verifier_lm_head.weight", "verifier_norm.weight")
_MOST_LISTED = 20
"""Names in one message; the tensors of files and configurations that have nothing in common are many."""

_FUSED = ("qkv_proj", "gate_up_proj")
"""No publisher writes these; a program's own memory does, and the programs differ in the order of the rows."""

_MEGATRON = frozenset(
    {"enorm", "hnorm", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "self_attention", "final_layernorm"}
)
_MEGATRON_NORMS = ("pre_fc_norm_",)


def normalize_names(names: Iterable[str]) -> NormalizedNames:
    """Map the dialects of every publisher to one set of names.

    Worked example: `draft.model.midlayer.mlp.up_proj.weight` -> `layers.0.mlp.up_proj.weight`.

    Args:
        names: as stored.
    """
    canonical: dict[str, str] = {}
    dropped = []
    for stored in names:
        name = stored
        while name.startswith(_WRAPPER_PREFIXES):
            name = name.split(".", 1)[1]
        if name.startswith("midlayer."):
            name = "layers.0." + name.removeprefix("midlayer.")
        if name in ("draft_id_to_target_id", "d2t.weight"):
            name = "d2t"
        if name.startswith(_NESTED_HEAD):
            name = name.removeprefix("logit_head.")
        if name.endswith(_DERIVED_SUFFIXES) or name in _TARGET_OWNED:
            dropped.append(stored)
            continue
        if not _MEGATRON.isdisjoint(name.split(".")) or any(part in name for part in _MEGATRON_NORMS):
            raise CheckpointError(
                f"tensor {stored} has a name of the Megatron layout. Export the draft to the Hugging Face layout first."
            )
        if any(part in name for part in _FUSED):
            raise CheckpointError(
                f"tensor {stored} is fused; whether its rows are grouped by head or by kind is not recorded. Export "
                "the draft with separate q/k/v and gate/up projections."
            )
        if name in canonical:
            raise CheckpointError(
                f"tensors {canonical[name]} and {stored} are the same one, {name}. Remove one of them."
            )
        canonical[name] = stored
    return NormalizedNames(canonical, tuple(dropped))


def check_tensor_shapes(shapes: Mapping[str, Sequence[int]], arch: DraftArchitecture) -> None:
    """Check canonical names and shapes against what the architecture consists of; list every difference.

    May be absent: what the policy's own tensor can stand in for, a table that can be rebuilt. May be present without
    being used: copies of the policy's embedding and head, the tables of an identity map, and, once their values were
    checked, tensors of zeros.

    Args:
        shapes: canonical name to shape.
        arch: the draft.
    """
    reason = arch.refusal(shapes.keys())
    if reason is not None:
        raise CheckpointError(reason)
    needed = arch.published_shapes() | arch.frozen_shapes()
    tables = {"d2t": (arch.draft_vocab_size,), "t2d": (arch.vocab_size,)}
    allowed = {**arch.ignored_shapes(), **arch.zero_shapes(), **tables, **needed}
    missing = sorted(needed.keys() - arch.optional_names() - tables.keys() - shapes.keys())
    unexpected = sorted(shapes.keys() - allowed.keys())
    wrong = [
        f"{name} has shape {list(shape)}, {list(allowed[name])} needed"
        for name, shape in sorted(shapes.items())
        if name in allowed and not _fits(name, tuple(shape), allowed[name])
    ]
    if "mask_hidden" in unexpected:
        raise CheckpointError(
            "holds mask_hidden: it proposes in parallel, policy.draft.algo names another algorithm. Set that to the "
            "draft's."
        )
    problems = [f"{len(missing)} missing: {_listed(missing)}"] if missing else []
    problems += [f"{len(unexpected)} unexpected: {_listed(unexpected)}"] if unexpected else []
    problems += wrong[:_MOST_LISTED] + ([f"{len(wrong)} shapes in all"] if len(wrong) > _MOST_LISTED else [])
    if problems:
        raise CheckpointError("tensors do not fit its config.json: " + "; ".join(problems) + ".")


def _fits(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    # The engine flattens the placeholder's feature, and publishers write it with one to three axes.
    return shape == wanted or (name == "mask_hidden" and prod(shape) == prod(wanted))


def _listed(names: Sequence[str]) -> str:
    return f"{list(names[:_MOST_LISTED])}{' and more' if len(names) > _MOST_LISTED else ''}"


def check_zeros(is_zero: Mapping[str, bool]) -> None:
    """Refuse tensors that the engine leaves out although they say something.

    Args:
        is_zero: canonical name of each of the architecture's `zero_shapes` that the checkpoint holds -> whether all its
            values are zero.
    """
    bad = sorted(name for name, value in is_zero.items() if not value)
    if bad:
        raise CheckpointError(
            f"{bad} hold values other than zero. The engine leaves these tensors out, so it would serve another draft "
            "than was trained. Use one trained without them."
        )
