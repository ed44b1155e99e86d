"""Drafts for speculative decoding, trained beside the policy.

Who does what, from the bottom up (an upper file may import a lower one, never the reverse):

    config        schema of `policy.draft`, one class per algorithm
    vocab         the draft vocabulary: d2t offsets, t2d mask           weight_files  headers of safetensors
    vocab_file    the file that names the ids of a new draft's vocabulary
    architecture  the draft's shape as a value, the tensors it has
    adapters      published config.json and tensor names <-> that value
    spec          DraftSpec: everything resolved and checked on the driver
    metadata      draft_meta.json: what a directory of ours holds, and whether it still does
    attention     trunk-and-branch attention of an unrolled draft      losses  chunked distillation
    metrics       names of the (num, den) pairs, the acceptance length that they predict
    models/       the drafts' modules
    builders      DraftSpec -> module: new, or from a directory
    capture       features from the policy's own forward
    publish       what is trained, sent and exported, under which names
    checkpoint    config.json and safetensors: export, load
    convert       a published draft as one value: layouts, dtypes, fewer ids, repaired tables
    runtime       _DraftRuntimeBase, the seam that the training worker talks to
    unroll        the plan of a draft that reads its own output
    eagle3        a runtime; one file per family
    registry      algo -> config, resolver, runtime: the only dispatch
    serving/      what vLLM lacks to serve a draft; runs in the engine's process, apart from all of the above

The public names are loaded when first used: half of these files need torch, and what the driver reads (registry, spec,
adapters, architecture, vocab, vocab_file, weight_files, metadata, metrics, config) does not. A new algorithm adds a
module in `models/`, a runtime file, a config class in the union at the end of `config`, a line in `registry` and its
tests.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "DRAFT_ALGORITHMS": "registry",
    "DraftSpec": "spec",
    "build_draft_runtime": "registry",
    "expected_acceptance_length": "metrics",
    "resolve_draft_spec": "spec",
    "resolve_spec": "registry",
}

__all__ = [*sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
