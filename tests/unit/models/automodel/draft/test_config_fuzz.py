"""Whatever a config.json holds, the driver reads it or says what is wrong with it: no crash, no wait, no allocation.

Every algorithm in every layout: its own export, changed at random places, beside weights that fit the unchanged one.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.adapters.base import SourceConfig, Verifier
from nemo_rl.models.automodel.draft.registry import DRAFT_ALGORITHMS, adapter_of, algorithm_of, resolve_spec
from nemo_rl.models.automodel.draft.spec import DraftSpec
from tests.unit.models.automodel.draft.algorithms import MASK_TOKEN, K, config_for

POLICY: dict[str, Any] = {
    "num_hidden_layers": 8,
    "hidden_size": 16,
    "vocab_size": MASK_TOKEN + 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 20,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
}
VERIFIER = Verifier("p", ("Qwen3ForCausalLM",))
CASES = [(algo, layout) for algo in DRAFT_ALGORITHMS for layout in adapter_of(algo).layouts]
MOST_BYTES, MOST_SECONDS = 50 << 20, 1.0

Path_ = tuple[str | int, ...]


class Export(NamedTuple):
    """A directory with weights, and the config.json that belongs to them."""

    directory: Path
    config: dict[str, Any]


@pytest.fixture(scope="module")
def exports() -> Iterator[dict[tuple[str, str], Export]]:
    with tempfile.TemporaryDirectory() as root:
        yield {case: _export(Path(root) / "-".join(case), *case) for case in CASES}


def _export(directory: Path, algo: str, layout: str) -> Export:
    adapter = adapter_of(algo)
    arch = resolve_spec(config_for(algo), policy_config=POLICY, k=K, max_model_len=64, dtype="float32").architecture
    config = (
        adapter.write_config(arch, dtype="float32")
        if layout == "native"
        else adapter.write_speculators(arch, dtype="float32", k=K, verifier=VERIFIER)
    )
    directory.mkdir()
    save_file(
        {name: torch.zeros(shape) for name, shape in arch.trained_shapes().items()}, directory / "model.safetensors"
    )
    return Export(directory, json.loads(json.dumps(config)))


def refusal(call: Callable[[], Any]) -> str | None:
    """Message of the only error that may come out of a call, None when none did."""
    try:
        call()
    except ConfigError as err:
        return str(err)
    return None


def read(algo: str, directory: Path, text: str) -> bool:
    """Do with a config.json what the driver does, and write it back; whether it was accepted."""
    (directory / "config.json").write_text(text)
    settings_ = {"ttt_steps": K} if algo == "eagle3" else {}
    cfg = DRAFT_ALGORITHMS[algo].config(enabled=True, model_name=str(directory), **settings_)
    specs: list[DraftSpec] = []
    message = refusal(
        lambda: specs.append(resolve_spec(cfg, policy_config=POLICY, k=K, max_model_len=64, dtype="float32"))
    )
    assert message is None or (message.startswith("policy.") and len(message) < 4096), message
    for spec in specs:
        adapter, arch = adapter_of(algo), spec.architecture
        json.dumps(adapter.write_config(arch, dtype="float32"))
        message = refusal(
            lambda write=adapter.write_speculators, arch=arch: json.dumps(
                write(arch, dtype="float32", k=K, verifier=VERIFIER)
            )
        )
        assert message is None or message.startswith("policy.draft.export_layouts")
    return bool(specs)


def recognise(raw: Any) -> None:
    """`claims` answers with true or false, and at most one algorithm is named."""
    assert all(adapter_of(name).claims(raw) in (True, False) for name in DRAFT_ALGORITHMS)
    message = refusal(lambda: algorithm_of(raw))
    assert message is None or message.startswith("policy.draft.algo")


# -- mutations -------------------------------------------------------------------------------------------------------


def paths(value: Any, prefix: Path_ = ()) -> Iterator[Path_]:
    """Every place inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*prefix, key)
        yield from paths(inner, (*prefix, key))


def at(value: Any, path: Path_) -> Any:
    return functools.reduce(lambda inner, key: inner[key], path, value)


def put(config: dict[str, Any], path: Path_, value: Any) -> None:
    # Copied, for the next change may be inside it.
    at(config, path[:-1])[path[-1]] = copy.deepcopy(value)


def deep(levels: int, *, is_list: bool = True) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value] if is_list else {"model_type": value}
    return value


AWKWARD: dict[str, Any] = {
    "null": None,
    "true": True,
    "false": False,
    "zero": 0,
    "negative": -1,
    "float": 2.0,
    "fraction": 0.3,
    "int32": 2**31,
    "int64": 2**63,
    "astronomic": 10**60,
    "largest_float": 1.7e308,
    "empty_text": "",
    "text": "qwen3",
    "number_as_text": "12",
    "surrogate": "\ud800",
    "empty_list": [],
    "list": [1, "x", None, {"a": 1}],
    "integers": [5, 3, 3, -1],
    "long_list": list(range(3000)),
    "empty_object": {},
    "object": {"rope_type": "yarn", "type": 7, "rope_theta": "x", "mask_token_id": [1]},
    "deep_list": deep(60),
    "deep_object": deep(60, is_list=False),
}

_leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(
        (
            *("llama", "qwen3", "yarn", "llama3", "linear", "dynamic", "mrope", "gated", "rnn", "full_attention"),
            *("LlamaForCausalLM", "LlamaEagle3DraftModel", "DFlashDraftModel", "eagle3", "dspark", "domino"),
        )
    )
)
_values = st.sampled_from(list(AWKWARD.values())) | st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
_NEW_KEYS = (
    *("eagle_config", "dflash_config", "speculators_model_type", "rope_scaling", "layer_types", "parallel_drafting"),
    *("mask_token_id", "target_layer_ids", "nemo_rl_draft", "text_config", "quantization_config", "foo", "is_causal"),
    *("aux_hidden_state_layer_ids", "projector_type", "num_draft_layers", "logit_scale", "use_sliding_window", "type"),
)


@st.composite
def mutated(draw: st.DrawFn, config: dict[str, Any]) -> dict[str, Any]:
    """A config with one to three changes."""
    config = copy.deepcopy(config)
    for _ in range(draw(st.integers(1, 3))):
        places = list(paths(config))
        if not places:
            break
        place = draw(st.sampled_from(places))
        kind = draw(st.sampled_from(["delete", "replace", "add", "move"]))
        objects = [(), *(p for p in places if isinstance(at(config, p), dict))]
        where = draw(st.sampled_from(objects))
        if kind == "delete":
            del at(config, place[:-1])[place[-1]]
        elif kind == "replace":
            put(config, place, draw(_values))
        elif kind == "add":
            put(config, (*where, draw(st.sampled_from(_NEW_KEYS))), draw(_values))
        else:
            put(config, (*where, str(place[-1])), at(config, place))
    return config


# -- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("algo", "layout"), CASES)
def test_the_unchanged_config_is_read(algo: str, layout: str, exports: dict[tuple[str, str], Export]) -> None:
    export = exports[algo, layout]
    assert read(algo, export.directory, json.dumps(export.config))
    assert algorithm_of(export.config) == algo


@pytest.mark.parametrize(("algo", "layout"), CASES)
def test_every_field_with_every_awkward_value(algo: str, layout: str, exports: dict[tuple[str, str], Export]) -> None:
    """Also every field absent; each change alone, through the adapter."""
    config, adapter = exports[algo, layout].config, adapter_of(algo)
    refused = 0
    for place in paths(config):
        parent, key = at(config, place[:-1]), place[-1]
        original = parent[key]
        for value in AWKWARD.values():
            parent[key] = value
            assert isinstance(adapter.claims(config), bool)
            message = refusal(lambda: adapter.read_config(config))
            assert message is None or message.startswith("policy.draft."), message
            refused += message is not None
        recognise(config)
        parent[key] = original
    assert refused > 200, "the values are awkward"


@pytest.mark.parametrize(("algo", "layout"), CASES)
def test_any_other_field_in_any_block(algo: str, layout: str, exports: dict[tuple[str, str], Export]) -> None:
    """What the reader lets through, the writers can write."""
    config, adapter = exports[algo, layout].config, adapter_of(algo)
    accepted = 0
    for place in [(), *paths(config)]:
        block = at(config, place)
        for key in _NEW_KEYS if isinstance(block, dict) else ():
            if key in block:
                continue
            for name in ("null", "true", "negative", "text", "integers", "object"):
                block[key] = AWKWARD[name]
                sources: list[SourceConfig] = []
                refusal(lambda sources=sources: sources.append(adapter.read_config(config)))
                for source in sources:
                    arch = adapter.architecture(**source.fields, feature_ids=source.feature_ids or ())
                    json.dumps(adapter.write_config(arch, dtype="float32"))
                    if layout == "speculators":
                        json.dumps(adapter.write_speculators(arch, dtype="float32", k=K, verifier=VERIFIER))
                    accepted += 1
            del block[key]
    assert accepted > 50, "most of them say nothing"


@pytest.mark.parametrize(("algo", "layout"), CASES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_change_is_read_or_refused_at_once(
    algo: str, layout: str, exports: dict[tuple[str, str], Export], data: st.DataObject
) -> None:
    export = exports[algo, layout]
    raw = data.draw(mutated(export.config))
    text = json.dumps(raw)
    tracemalloc.start()
    try:
        start = time.thread_time()
        recognise(raw)
        read(algo, export.directory, text)
        seconds = time.thread_time() - start
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES
    assert seconds < MOST_SECONDS


@settings(max_examples=60, deadline=None, derandomize=True)
@given(raw=st.dictionaries(st.sampled_from([*_NEW_KEYS, *POLICY, "architectures", "model_type"]), _values, max_size=6))
def test_any_object_is_no_reason_to_crash(raw: dict[str, Any]) -> None:
    recognise(raw)
    for algo in DRAFT_ALGORITHMS:
        with pytest.raises(ConfigError):
            adapter_of(algo).read_config(raw)


@pytest.mark.parametrize("algo", DRAFT_ALGORITHMS)
@pytest.mark.parametrize(
    "text",
    [
        '{"a": ' * 900 + "1" + "}" * 900,
        '{"foo": ' + "[" * (sys.getrecursionlimit() - 250) + "]" * (sys.getrecursionlimit() - 250) + "}",
        "[" * 200_000,
        '{"hidden_size": ' + "9" * 5000 + "}",
        '{"hidden_size": NaN}',
        '{"hidden_size": 1e999}',
        '{"foo": "' + "x" * (1 << 21) + '"}',
        "[1, 2]",
        "null",
        "",
    ],
    ids=["deep", "deep_field", "unclosed", "digits", "nan", "infinite", "large", "list", "null", "empty"],
)
def test_files_that_are_hardly_json(algo: str, text: str, exports: dict[tuple[str, str], Export]) -> None:
    assert not read(algo, exports[algo, "native"].directory, text)


@pytest.mark.parametrize(("algo", "layout"), CASES)
def test_an_unknown_field_may_be_anything_but_bottomless(
    algo: str, layout: str, exports: dict[tuple[str, str], Export]
) -> None:
    export = exports[algo, layout]
    for name, value in AWKWARD.items():
        assert read(algo, export.directory, json.dumps({**export.config, "foo": value})) is not name.startswith("deep")
    depth = sys.getrecursionlimit() - 250
    text = json.dumps(export.config)[:-1] + ', "foo": ' + "[" * depth + "]" * depth + "}"
    assert not read(algo, export.directory, text)
