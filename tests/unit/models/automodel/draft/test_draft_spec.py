"""Resolving the draft on the driver: what it becomes, and every way in which it does not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft import metrics
from nemo_rl.models.automodel.draft.adapters.eagle3 import Eagle3Adapter
from nemo_rl.models.automodel.draft.checkpoint import META_FILE, save_draft
from nemo_rl.models.automodel.draft.config import Eagle3DraftConfig
from nemo_rl.models.automodel.draft.registry import DRAFT_ALGORITHMS, adapter_of, resolve_spec
from nemo_rl.models.automodel.draft.spec import resolve_draft_spec
from nemo_rl.models.automodel.draft.vocab import VocabMap
from nemo_rl.models.generation.vllm.engine_args import engine_limits
from nemo_rl.utils.safe_files import read_json_object
from tests.unit.models.automodel.draft.helpers import VOCAB, make_arch, make_module, make_spec

POLICY = {
    "num_hidden_layers": 8,
    "hidden_size": 12,
    "vocab_size": VOCAB,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "initializer_range": 0.05,
}


def _resolve(cfg=None, *, policy=None, k=3, max_model_len=64, **kwargs):
    settings = {"enabled": True, **(cfg or {})}
    return resolve_spec(
        Eagle3DraftConfig(**settings),
        policy_config={**POLICY, **(policy or {})},
        k=k,
        max_model_len=max_model_len,
        dtype="float32",
        **kwargs,
    )


def test_a_new_draft_takes_everything_from_the_policy():
    spec = _resolve()
    arch = spec.architecture
    assert arch.feature_ids == (2, 4, 5)
    assert (arch.hidden_size, arch.target_hidden_size, arch.head_dim, arch.num_key_value_heads) == (12, 12, 32, 2)
    assert arch.rope == {"rope_type": "default", "rope_theta": 1e6}
    assert (arch.vocab_size, arch.draft_vocab_size) == (VOCAB, VOCAB)
    assert spec.source == "scratch"
    assert spec.initializer_range == 0.05
    assert spec.speculative_config(model_dir="/d") == {"method": "eagle3", "model": "/d", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("k", "policy_positions", "covered"),
    [
        pytest.param(3, 4096, 1004, id="proposals-run-behind-the-last-token"),
        pytest.param(3, 1002, 1002, id="the-policy-has-no-more"),
        pytest.param(None, 4096, 1000, id="not-served"),
    ],
)
def test_a_short_published_table_covers_every_position_that_the_engine_drafts_at(k, policy_positions, covered):
    """The engine is started K + 1 positions longer than its requests and indexes the draft's table with those, too."""
    policy = POLICY | {"max_position_embeddings": policy_positions}
    draft = POLICY | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    spec = resolve_draft_spec(
        adapter_of("eagle3"),
        Eagle3DraftConfig(enabled=True, serve=k is not None),
        policy_config=policy,
        draft_config=draft | {"max_position_embeddings": 48},
        k=k,
        max_model_len=1000,
        dtype="float32",
    )
    assert spec.architecture.max_position_embeddings == covered
    limits = engine_limits(max_model_len=1000, model_max_len=policy_positions, num_speculative_tokens=k or 0)
    assert covered >= limits.engine_max_model_len


def test_layers_of_the_configuration_are_outputs_counted_from_zero():
    assert _resolve({"aux_layer_indices": [0, 3, 6]}).architecture.feature_ids == (1, 4, 7)
    boundary = {"aux_layer_indices": [-1, 3, 7], "allow_boundary_layers": True}
    assert _resolve(boundary).architecture.feature_ids == (0, 4, 8)


def test_a_policy_inside_a_wrapped_config_is_found():
    spec = resolve_spec(
        Eagle3DraftConfig(enabled=True),
        policy_config={"text_config": POLICY, "model_type": "wrapped"},
        k=1,
        max_model_len=64,
        dtype="bfloat16",
    )
    assert spec.num_target_layers == 8


def test_a_plain_rope_table_is_raised_to_the_engines_length():
    assert _resolve(max_model_len=1000).architecture.max_position_embeddings == 1000
    assert _resolve(max_model_len=50).architecture.max_position_embeddings == 64


@pytest.mark.parametrize(
    ("cfg", "changes", "match"),
    [
        ({}, {"k": 0}, r"num_speculative_tokens: got 0; must be an integer >= 1"),
        ({}, {"k": -2}, r"got -2"),
        ({}, {"k": True}, r"got True"),
        ({}, {"k": 2.0}, r"got 2.0"),
        ({"ttt_steps": 3}, {"k": 4}, r"got 4; the draft is trained to propose at most 3.*ttt_steps >= 4"),
        ({"aux_layer_indices": [0, 3, 7]}, {}, r"aux_layer_indices: got \[0, 3, 7\]; \[7\] is outside 0..6"),
        ({"aux_layer_indices": [-1, 3]}, {}, r"\[-1\] is outside"),
        ({"aux_layer_indices": [0, 8], "allow_boundary_layers": True}, {}, r"\[8\] is outside -1..7"),
        ({}, {"policy": {"num_hidden_layers": 4}}, r"aux_layer_indices: got null.*policy of 4 layers.*\[0, 1, 2\]"),
        (
            {"draft_vocab_size": VOCAB + 1},
            {},
            rf"draft_vocab_size: got {VOCAB + 1}; must be an integer from 1 to {VOCAB}",
        ),
        ({"draft_vocab_size": 9}, {}, r"draft_vocab_size: got 9 of 23.*token counts"),
        ({"draft_vocab_size": 9}, {"vocab_ids": [1, 1]}, r"draft_vocab_size.*distinct"),
        ({"draft_vocab_size": 9}, {"vocab_ids": [1, 2]}, r"draft_vocab_size: got 9, and 2 ids"),
        ({"num_key_value_heads": 3}, {}, r"num_key_value_heads: got 3; must divide the 4"),
        ({"head_dim": 31}, {}, r"head_dim: got 31; must be even"),
        ({"head_dim": 16}, {"device": "cpu"}, r"head_dim: got 16; the engine's CPU attention supports \[32, 64"),
        ({"fc_norm": True, "norm_before_fc": True}, {}, r"fc_norm: got true beside norm_before_fc"),
        ({}, {"policy": {"rope_parameters": None}}, r"policy.model_name.*neither rope_theta"),
        ({}, {"policy": {"intermediate_size": None}}, r"policy.draft.intermediate_size: got null"),
        ({}, {"policy": {"hidden_size": None}}, r"policy.model_name.*lacks \['hidden_size'\]"),
        ({}, {"policy": {"rms_norm_eps": None}}, r"policy.model_name.*rms_norm_eps"),
        (
            {},
            {
                "policy": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
                "max_model_len": 65,
            },
            r"RoPE table \(linear\) covers 64 positions.*max_model_len is 65",
        ),
        (
            {"model_name": "/nonexistent/draft"},
            {},
            r"policy.draft.model_name: got /nonexistent/draft; there is no such",
        ),
    ],
)
def test_what_does_not_fit_names_key_value_and_remedy(cfg, changes, match):
    with pytest.raises(ConfigError, match=match) as err:
        _resolve(cfg, **changes)
    assert err.value.exit_code == 2


# -- from a directory ------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    """Write a draft directory; returns a function of architecture changes."""

    def write(ids=None, **changes):
        arch = make_arch(**{"head_dim": 32, "feature_ids": (1, 4, 6), **changes})
        vocab = None if ids is None else VocabMap(tuple(ids), VOCAB)
        embedding = torch.zeros(VOCAB, arch.hidden_size) if arch.owns_embedding else None
        save_draft(
            tmp_path,
            make_spec(arch, ids=ids),
            config=Eagle3Adapter().write_config(arch, dtype="float32"),
            published=dict(make_module(arch).named_parameters()),
            vocab=vocab,
            embedding=embedding,
        )
        (tmp_path / META_FILE).unlink()  # the tests below change files; as the draft of another program it may be
        return tmp_path

    return write


def _rewrite_config(directory, **changes):
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v != "absent"}))


def test_a_directory_is_taken_as_it_is(stored):
    directory = stored(ids=[5, 2, 19], draft_vocab_size=3, norm_output=True, num_hidden_layers=2)
    spec = _resolve({"model_name": str(directory)})
    assert spec.source == "directory"
    assert spec.architecture.feature_ids == (1, 4, 6)
    assert spec.architecture.norm_output
    assert spec.architecture.num_hidden_layers == 2
    assert spec.vocab_ids == (5, 2, 19)


@pytest.mark.parametrize(
    ("cfg", "match"),
    [
        ({"aux_layer_indices": [0, 1, 2]}, r"aux_layer_indices: got \[0, 1, 2\]; the draft was trained on \[0, 3, 5\]"),
        ({"norm_output": True}, r"norm_output: got True; the draft in policy.draft.model_name has False"),
        ({"num_layers": 2}, r"num_layers: got 2; .* has 1"),
        ({"intermediate_size": 21}, r"intermediate_size: got 21; .* has 20"),
        ({"draft_vocab_size": 7}, r"draft_vocab_size: got 7; .* has 23"),
    ],
)
def test_settings_that_contradict_the_directory_are_refused(stored, cfg, match):
    with pytest.raises(ConfigError, match=match):
        _resolve({"model_name": str(stored()), **cfg})


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        ({"hidden_size": 24}, r"features of size 12; the policy's hidden_size is 24"),
        ({"vocab_size": 24}, r"vocabulary of size 23; the policy's vocab_size is 24"),
        ({"num_hidden_layers": 6}, r"aux_layer_indices: got \[0, 3, 5\]; \[5\] is outside"),
    ],
)
def test_a_draft_of_another_policy_is_refused(stored, policy, match):
    with pytest.raises(ConfigError, match=match):
        _resolve({"model_name": str(stored())}, policy=policy)


def test_absent_ids_mean_the_default_triple_or_must_be_given(stored):
    directory = stored(feature_ids=(2, 4, 5))
    _rewrite_config(directory, eagle_aux_hidden_state_layer_ids="absent", eagle_config="absent", nemo_rl_draft="absent")
    assert _resolve({"model_name": str(directory)}).architecture.feature_ids == (2, 4, 5)
    assert _resolve({"model_name": str(directory), "aux_layer_indices": [0, 2, 6]}).architecture.feature_ids == (
        1,
        3,
        7,
    )
    with pytest.raises(ConfigError, match=r"got 2 layers; it reads 3"):
        _resolve({"model_name": str(directory), "aux_layer_indices": [0, 2]})
    _rewrite_config(directory, architectures=["LlamaEagle3DraftModel"])
    with pytest.raises(ConfigError, match=r"aux_layer_indices: got null.*never writes the layers"):
        _resolve({"model_name": str(directory)})


def test_ambiguous_norm_output_needs_a_decision(stored):
    directory = stored(norm_output=True)
    _rewrite_config(directory, nemo_rl_draft="absent")
    with pytest.raises(ConfigError, match=r"policy.draft.norm_output: got nothing"):
        _resolve({"model_name": str(directory)})
    assert _resolve({"model_name": str(directory), "norm_output": True}).architecture.norm_output


def _change_tensors(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop("fc.weight"), r"1 missing: \['fc.weight'\]"),
        (lambda t: t.update({"extra.weight": torch.zeros(1)}), r"1 unexpected: \['extra.weight'\]"),
        (lambda t: t.update({"norm.weight": torch.zeros(13)}), r"norm.weight has shape \[13\], \[12\] needed"),
        (lambda t: t.pop("d2t"), r"has no d2t"),
        (lambda t: t.update({"d2t": torch.arange(20, 23)}), r"lie outside"),
        (lambda t: t.update({"t2d": torch.zeros(VOCAB, dtype=torch.bool)}), r"t2d and d2t disagree about 3"),
    ],
    ids=["missing", "extra", "shape", "no_d2t", "arange", "t2d"],
)
def test_tensors_that_do_not_fit_are_found_from_the_headers(stored, change, match):
    directory = stored(ids=[5, 2, 19], draft_vocab_size=3)
    _change_tensors(directory, change)
    with pytest.raises(ConfigError, match=match) as err:
        _resolve({"model_name": str(directory)})
    assert str(directory) in str(err.value)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-5]), "truncated"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\x01"), "truncated or not a safetensors"),
        (
            lambda d: (d / "model.safetensors").write_bytes(b"\x10" + b"\0" * 7 + b"{" * 20),
            "damaged safetensors header",
        ),
        (lambda d: (d / "model.safetensors").unlink(), "holds no weights"),
        (lambda d: (d / "config.json").write_text("{"), r"config.json: is not valid JSON"),
        (lambda d: (d / "config.json").unlink(), r"config.json: cannot be read"),
        (
            lambda d: (d / "model.safetensors").rename(d / "model-00001-of-00002.safetensors"),
            "no model.safetensors.index",
        ),
        (lambda d: (d / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
        (
            lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}'),
            r"names the shard '../x.safetensors'",
        ),
        (
            lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}'),
            r"gone.safetensors, which does not exist",
        ),
    ],
    ids=["cut", "empty", "header", "none", "json", "no_config", "no_index", "empty_index", "outside", "lost_shard"],
)
def test_damaged_files_are_named(stored, damage, match):
    directory = stored()
    damage(directory)
    with pytest.raises(ConfigError, match=match) as err:
        _resolve({"model_name": str(directory)})
    assert str(directory) in str(err.value)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda d: os.mkfifo(_emptied(d / "config.json")), r"config.json: cannot be read \(it is not a regular file"),
        (lambda d: os.mkfifo(_emptied(d / "model.safetensors")), r"model.safetensors: cannot be read \(it is not a"),
        (lambda d: _emptied(d / "config.json").symlink_to("/etc/hostname"), r"is a symbolic link to /etc/hostname"),
        (
            lambda d: (d / "config.json").write_text('{"a": 1, "a": 2}'),
            r"config.json: .*the key 'a' is in one object tw",
        ),
        (lambda d: _change_tensors(d, _quantize), r"'fc.weight', F8_E5M2\): the draft is quantized"),
        (
            lambda d: _rewrite_config(d, intermediate_size=1 << 20),
            r"gate_proj.weight has shape \[20, 12\], \[1048576, 12",
        ),
        (lambda d: _rewrite_config(d, num_hidden_layers=1000), r"8991 missing: .* and more"),
    ],
    ids=["pipe", "weights_pipe", "link", "twice", "quantized", "huge", "many_layers"],
)
def test_files_made_to_do_harm_are_refused_before_anything_is_allocated(stored, damage, match):
    directory = stored()
    (directory / META_FILE).unlink(missing_ok=True)
    damage(directory)
    with pytest.raises(ConfigError, match=match) as err:
        _resolve({"model_name": str(directory)})
    assert len(str(err.value)) < 4000


def _emptied(path):
    path.unlink()
    return path


def _quantize(tensors):
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e5m2)


def test_all_problems_can_be_asked_for(stored):
    directory = stored()
    cfg = Eagle3DraftConfig(enabled=True, model_name=str(directory), ttt_steps=2, freeze=("nothing",))
    problems: list[str] = []
    spec = resolve_draft_spec(
        Eagle3Adapter(),
        cfg,
        policy_config={**POLICY, "vocab_size": VOCAB + 1},
        draft_config=read_json_object(directory / "config.json"),
        k=3,
        max_model_len=64,
        dtype="float32",
        problems=problems,
    )
    assert spec.architecture.vocab_size == VOCAB
    assert [text.split(":")[0].rpartition(".")[2] for text in problems] == [
        "model_name",
        "num_speculative_tokens",
        "freeze",
    ]


def test_shards_are_read_and_a_pickle_needs_trust(stored):
    directory = stored()
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save(tensors, directory / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model.bin is a pickle.*trust_pickle: true"):
        _resolve({"model_name": str(directory)})
    assert _resolve({"model_name": str(directory), "trust_pickle": True}).source == "directory"
    names = sorted(tensors)
    save_file({n: tensors[n] for n in names[:4]}, directory / "a.safetensors")
    save_file({n: tensors[n] for n in names[4:]}, directory / "b.safetensors")
    weight_map = {n: "a.safetensors" if i < 4 else "b.safetensors" for i, n in enumerate(names)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert _resolve({"model_name": str(directory)}).source == "directory"
    save_file(tensors, directory / "a.safetensors")
    with pytest.raises(ConfigError, match="is in two shards"):
        _resolve({"model_name": str(directory)})


# -- the table, laziness, metrics ------------------------------------------------------------------------------------


def test_the_driver_resolves_a_draft_without_torch():
    code = (
        "import sys, json\n"
        "from nemo_rl.models.automodel.draft import resolve_spec\n"
        "from nemo_rl.models.automodel.draft.config import Eagle3DraftConfig\n"
        f"policy = json.loads({json.dumps(json.dumps(POLICY))})\n"
        "resolve_spec(Eagle3DraftConfig(enabled=True), policy_config=policy, k=1, max_model_len=8, dtype='float32')\n"
        "heavy = {'torch', 'ray', 'vllm', 'transformers', 'nemo_automodel', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("algo", sorted(DRAFT_ALGORITHMS))
def test_each_algorithm_of_the_table_is_whole(algo):
    from nemo_rl.models.automodel.draft.registry import _load
    from nemo_rl.models.automodel.draft.runtime import _DraftRuntimeBase

    entry = DRAFT_ALGORITHMS[algo]
    assert entry.config.model_fields["algo"].default == algo
    assert _load(entry.runtime).adapter.algo == algo
    assert entry.config.serving_methods
    assert adapter_of(algo).algo == algo
    assert issubclass(_load(entry.runtime), _DraftRuntimeBase)


def test_an_unknown_algorithm_lists_the_known_ones():
    class Other(Eagle3DraftConfig):
        algo: str = "eagle9"

    with pytest.raises(ConfigError, match=r"policy.draft.algo: got 'eagle9'; must be one of .*'eagle3'"):
        resolve_spec(Other(), policy_config=POLICY, k=1, max_model_len=8, dtype="float32")


def test_expected_acceptance_adds_ratios_per_ordinal():
    pairs = {"prefix_greedy_1": (3.0, 4.0), "prefix_greedy_2": (1.0, 2.0), "prefix_greedy_3": (0.0, 0.0)}
    assert metrics.expected_acceptance_length(pairs) == pytest.approx(1 + 0.75 + 0.5)
    assert metrics.expected_acceptance_length(pairs, max_tokens=1) == pytest.approx(1.75)
    assert metrics.expected_acceptance_length({}) == 1.0
    perfect = {f"prefix_hit_{j}": (5.0, 5.0) for j in range(1, 5)}
    assert metrics.expected_acceptance_length(perfect, "hit") == 5.0


def test_replay_walks_along_a_response_as_the_engine_does():
    from nemo_rl.models.automodel.draft.metrics import replay_drafting

    one = [(4, 2), (5, 3), (6, 0), (7, 1), (8, 0), (9, 0)]
    counts = replay_drafting(one)
    assert counts.accepted == (2, 1, 0)
    assert (counts.num_drafts, counts.num_accepted) == (3, 3)
    assert [counts.at_least(j) for j in (1, 2, 3)] == [2, 1, 0]
    # A gap starts another response, wherever the chain before it would have ended; the order of the rows is free.
    other = [(20, 3), (21, 0), (30, 0)]
    assert replay_drafting([*other, *reversed(one)]).accepted == (2, 1, 0, 3, 0)
    assert replay_drafting([]).num_drafts == 0
