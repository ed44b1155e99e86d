"""DSpark and Domino in configuration and files: new drafts, published layouts, what is refused, exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.adapters.domino import DominoAdapter
from nemo_rl.models.automodel.draft.adapters.dspark import DSparkAdapter
from nemo_rl.models.automodel.draft.config import DominoDraftConfig, DSparkDraftConfig
from nemo_rl.models.automodel.draft.registry import build_draft_runtime, resolve_spec
from tests.unit.models.automodel.draft.block_helpers import MASK, PERMUTED_IDS
from tests.unit.models.automodel.draft.helpers import TARGET_LAYERS, VOCAB, StubPolicy, make_documents, run_step
from tests.unit.models.automodel.draft.test_block_heads_reference import domino_runtime, dspark_runtime
from tests.unit.models.automodel.draft.test_dflash_spec import POLICY

CONFIGS = {"dspark": DSparkDraftConfig, "domino": DominoDraftConfig}
ADAPTERS = {"dspark": DSparkAdapter(), "domino": DominoAdapter()}
RUNTIMES = {"dspark": dspark_runtime, "domino": domino_runtime}
CPU_EXTENSION = "nemo_rl.models.automodel.draft.serving.dspark:install"
DOMINO_EXTENSION = "nemo_rl.models.automodel.draft.serving.domino:install"


def resolve(algo: str, *, k: int = 4, device: str | None = None, policy: Any = None, **settings: Any) -> Any:
    vocab_ids = settings.pop("vocab_ids", None)
    settings = {"mask_token_id": MASK, "aux_layer_indices": [0, 2], **settings}
    cfg = CONFIGS[algo](enabled=True, **{key: v for key, v in settings.items() if v is not None})
    return resolve_spec(
        cfg,
        policy_config={**POLICY, "head_dim": 32} | (policy or {}),
        k=k,
        max_model_len=64,
        dtype="float32",
        device=device,
        vocab_ids=vocab_ids,
    )


# -- new drafts ------------------------------------------------------------------------------------------------------


def test_a_new_dspark_draft_has_the_usual_heads() -> None:
    spec = resolve("dspark")
    arch = spec.architecture
    assert (arch.block_size, arch.num_predicted, arch.first_slot, arch.causal) == (4, 4, 0, False)
    assert (arch.markov_rank, arch.markov_head_type) == (256, "vanilla")
    assert (arch.enable_confidence_head, arch.confidence_head_with_markov) == (True, True)
    assert resolve("dspark", sample_from_anchor=False).architecture.block_size == 5
    assert resolve("dspark", k=3, sample_from_anchor=False, block_size=4).num_speculative_tokens == 3


def test_a_new_domino_draft_has_the_usual_head() -> None:
    arch = resolve("domino").architecture
    assert (arch.block_size, arch.num_predicted, arch.first_slot) == (4, 4, 0)
    assert (arch.emb_dim, arch.gru_hidden_dim, arch.pure_draft_prefix_len, arch.shift_label) == (256, 1024, 1, True)
    assert resolve("domino", shift_label=False).architecture.block_size == 5


@pytest.mark.parametrize(
    ("algo", "device", "method", "extension"),
    [
        ("dspark", "cuda", "dspark", None),
        ("dspark", None, "dspark", None),
        ("dspark", "cpu", "dflash", CPU_EXTENSION),
        ("domino", "cuda", "dflash", DOMINO_EXTENSION),
        ("domino", "cpu", "dflash", DOMINO_EXTENSION),
    ],
)
def test_how_the_engine_runs_them(algo: str, device: str | None, method: str, extension: str | None) -> None:
    spec = resolve(algo, device=device)
    wanted = {"method": method, "model": "/x", "num_speculative_tokens": 4}
    assert spec.speculative_config(model_dir="/x") == wanted
    assert spec.serving_extension == extension
    assert method in CONFIGS[algo].serving_methods


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_heads_that_no_engine_serves_are_trained_only(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"policy.draft.markov_head_type: got {kind}.*serve: false"):
        resolve("dspark", markov_head_type=kind)
    spec = resolve("dspark", markov_head_type=kind, serve=False, block_size=6)
    assert spec.speculative_config(model_dir="/x") is None
    assert spec.num_speculative_tokens == 6
    assert any(name.startswith("markov_head.") for name in spec.trained_names)


@pytest.mark.parametrize(
    ("algo", "settings", "match"),
    [
        ("dspark", {"block_size": 5}, "num_speculative_tokens: got 4; a block of 5 slots predicts 5"),
        ("dspark", {"block_size": 4, "sample_from_anchor": False}, "got 4; a block of 4 slots predicts 3"),
        ("dspark", {"mask_token_id": None}, "policy.draft.mask_token_id: got null for a new draft"),
        ("dspark", {"mask_token_id": VOCAB}, "policy.draft.mask_token_id: got 23"),
        ("domino", {"block_size": 8}, "num_speculative_tokens: got 4; a block of 8 slots predicts 8"),
        ("domino", {"pure_draft_prefix_len": 4}, "policy.draft.pure_draft_prefix_len: got 4; must be below the 4"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_settings_that_contradict_each_other_name_the_key(algo: str, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        resolve(algo, **settings)


# -- files -----------------------------------------------------------------------------------------------------------


def written(algo: str, **changes: Any) -> dict[str, Any]:
    """A native config.json of the tiny draft; None removes a key, a dict is merged into the nested block."""
    raw = ADAPTERS[algo].write_config(RUNTIMES[algo]().spec.architecture, dtype="float32")
    nested = changes.pop("nested", {})
    raw = {k: v for k, v in {**raw, **changes}.items() if v is not None}
    raw["dflash_config"] = {k: v for k, v in {**raw["dflash_config"], **nested}.items() if v is not None}
    return raw


def read(algo: str, raw: dict[str, Any]) -> Any:
    source = ADAPTERS[algo].read_config(raw)
    return ADAPTERS[algo].architecture(**source.fields, feature_ids=source.feature_ids)


def test_dspark_exports_say_everything_where_both_runners_look() -> None:
    raw = written("dspark")
    assert raw["architectures"] == ["Qwen3DSparkModel"]
    assert raw["model_type"] == "qwen3"
    top = ("block_size", "mask_token_id", "target_layer_ids", "sample_from_anchor", "markov_rank", "markov_head_type")
    assert [raw[key] for key in top] == [4, MASK, [0, 2], True, 5, "vanilla"]
    assert raw["enable_confidence_head"] is True
    assert raw["confidence_head_with_markov"] is True
    nested = {"mask_token_id": MASK, "target_layer_ids": [0, 2], "block_size": 4, "causal": False}
    assert raw["dflash_config"] == nested
    for absent in ("eagle_config", "is_causal", "n_predict", "num_lookahead_tokens", "auto_map", "logit_scale"):
        assert absent not in raw


def test_domino_exports_say_everything_in_the_nested_block() -> None:
    raw = written("domino")
    assert raw["architectures"] == ["DominoDraftModel"]
    head = {"projector_type": "domino", "emb_dim": 6, "gru_hidden_dim": 7, "pure_draft_prefix_len": 1}
    assert raw["dflash_config"].items() >= {**head, "shift_label": True}.items()


@pytest.mark.parametrize("algo", ["dspark", "domino"])
@pytest.mark.parametrize("kept", [{}, {"num_target_layers": TARGET_LAYERS, "num_anchors": 512, "foo": {"a": 1}}])
def test_config_round_trip(algo: str, kept: dict[str, Any]) -> None:
    raw = json.loads(json.dumps(written(algo, **kept, nested={"bar": 2} if kept else {})))
    arch = read(algo, raw)
    again = ADAPTERS[algo].write_config(arch, dtype="float32")
    assert again == raw
    assert ADAPTERS[algo].read_config(raw).publisher == "nemo_rl"
    assert arch.identity() == RUNTIMES[algo]().spec.architecture.identity()


def specforge_dspark() -> dict[str, Any]:
    """Everything in the nested block, another class name, code to be run."""
    raw = written("dspark", nemo_rl_draft=None, auto_map={"AutoModel": "x.Y"}, architectures=["DSparkDraftModel"])
    heads = ("sample_from_anchor", "markov_rank", "markov_head_type", "enable_confidence_head")
    moved = {key: raw.pop(key) for key in (*heads, "confidence_head_with_markov", "mask_token_id", "target_layer_ids")}
    raw["dflash_config"] |= {**moved, "projector_type": "dspark"}
    return raw


def speculators_dspark(**changes: Any) -> dict[str, Any]:
    flat = written("dspark")
    heads = {k: flat[k] for k in ("markov_rank", "markov_head_type", "enable_confidence_head")}
    layer = {k: v for k, v in flat.items() if k not in (*heads, "dflash_config", "block_size", "sample_from_anchor")}
    raw = {
        "architectures": ["Qwen3DSparkModel"],
        "speculators_model_type": "dspark",
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}]},
        "transformer_layer_config": layer,
        "draft_vocab_size": VOCAB,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": MASK,
        "block_size": 4,
        "sample_from_anchor": True,
        "confidence_head_with_markov": True,
        **heads,
    }
    return {k: v for k, v in {**raw, **changes}.items() if v is not None}


@pytest.mark.parametrize(
    "raw",
    [
        written("dspark", nemo_rl_draft=None, dflash_config={}),
        # A native file without the layout predicts from the anchor.
        written("dspark", sample_from_anchor=None),
        specforge_dspark(),
        speculators_dspark(),
    ],
    ids=["flat", "no_layout", "nested", "speculators"],
)
def test_published_dspark_layouts_are_one_draft(raw: dict[str, Any]) -> None:
    arch = read("dspark", json.loads(json.dumps(raw)))
    assert arch.identity() == dspark_runtime().spec.architecture.identity()
    assert ADAPTERS["dspark"].write_config(arch, dtype="float32").keys() >= written("dspark").keys()
    assert "auto_map" not in ADAPTERS["dspark"].write_config(arch, dtype="float32")


@pytest.mark.parametrize(
    ("algo", "raw", "match"),
    [
        ("dspark", written("dspark", architectures=["DFlashDraftModel"]), "another algorithm"),
        ("dspark", written("dspark", markov_rank=None), r"lacks \['markov_rank'\]"),
        ("dspark", written("dspark", enable_confidence_head=None), r"lacks \['enable_confidence_head'\]"),
        (
            "dspark",
            written("dspark", nested={"markov_rank": 7}),
            "markov_rank is 5, .*markov_rank is 7",
        ),
        ("dspark", written("dspark", nested={"projector_type": "domino"}), "projector_type 'domino'"),
        (
            "dspark",
            written("dspark", nested={"block_size": 9}),
            "block_size is 4, .*block_size is 9",
        ),
        ("dspark", written("dspark", logit_scale=2.0), "logit_scale 2.0"),
        ("dspark", speculators_dspark(speculators_model_type="dflash"), "speculators_model_type 'dflash'"),
        ("dspark", speculators_dspark(sample_from_anchor=False), "proposes 4 tokens"),
        ("domino", written("domino", nested={"projector_type": None}), "projector_type None"),
        ("domino", written("domino", nested={"emb_dim": None}), r"lacks \['emb_dim'\]"),
        ("domino", written("domino", architectures=["Qwen3DSparkModel"]), "another algorithm"),
    ],
    ids=lambda v: v.replace(" ", "_") if isinstance(v, str) else "",
)
def test_configs_that_cannot_be_used_name_the_field(algo: str, raw: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=f"policy.draft.model_name.*{match}"):
        ADAPTERS[algo].read_config(raw)


def _write(directory: Path, algo: str, raw: dict[str, Any], **tensors: torch.Tensor | None) -> Any:
    """A directory with the tensors of a tiny draft; None leaves one out."""
    runtime = RUNTIMES[algo]()
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    stored = {**runtime.module.state_dict(), **tensors}
    save_file({n: t for n, t in stored.items() if t is not None}, directory / "model.safetensors")
    return runtime


LOADED = {"mask_token_id": None, "aux_layer_indices": None, "policy": {"head_dim": 8}}


def test_a_speculators_file_without_the_layout_needs_it_stated(tmp_path: Path) -> None:
    _write(tmp_path / "d", "dspark", speculators_dspark(sample_from_anchor=None))
    given = {"model_name": str(tmp_path / "d"), **LOADED}
    with pytest.raises(ConfigError, match=r"policy.draft.sample_from_anchor: got null"):
        resolve("dspark", **given)
    assert resolve("dspark", sample_from_anchor=True, **given).architecture.num_predicted == 4
    assert resolve("dspark", k=3, sample_from_anchor=False, **given).architecture.num_predicted == 3


@pytest.mark.parametrize(
    ("algo", "settings", "match"),
    [
        ("dspark", {"markov_rank": 6}, "policy.draft.markov_rank: got 6; the draft .* has 5"),
        ("dspark", {"sample_from_anchor": False}, "policy.draft.sample_from_anchor: got False; the draft .* has True"),
        ("dspark", {"block_size": 8}, "policy.draft.block_size: got 8; the draft .* has 4"),
        ("domino", {"shift_label": False}, "policy.draft.shift_label: got False; the draft .* has True"),
        ("domino", {"k": 3}, "num_speculative_tokens: got 3; a block of 4 slots predicts 4"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_a_loaded_draft_keeps_its_shape(tmp_path: Path, algo: str, settings: dict[str, Any], match: str) -> None:
    _write(tmp_path / "d", algo, written(algo))
    with pytest.raises(ConfigError, match=match):
        resolve(algo, model_name=str(tmp_path / "d"), **LOADED | settings)


def test_a_head_that_the_file_lacks_is_named(tmp_path: Path) -> None:
    _write(tmp_path / "d", "dspark", written("dspark"), **{"confidence_head.proj.bias": None})
    with pytest.raises(ConfigError, match=r"1 missing: \['confidence_head.proj.bias'\]"):
        resolve("dspark", model_name=str(tmp_path / "d"), **LOADED)


def _build(algo: str, directory: Path, policy: Any) -> Any:
    cfg = CONFIGS[algo](enabled=True, model_name=str(directory))
    spec = resolve(algo, model_name=str(directory), **LOADED)
    return build_draft_runtime(
        cfg, spec, policy_model=policy, device="cpu", dtype="float32", draft_dir=str(directory), seed=0
    )


def test_stale_copies_of_the_policys_tensors_are_ignored(tmp_path: Path) -> None:
    """Published DSpark files carry them."""
    copies = {"embed_tokens.weight": torch.zeros(VOCAB, 12), "lm_head.weight": torch.zeros(VOCAB, 12)}
    original = _write(tmp_path / "d", "dspark", written("dspark"), **copies)
    loaded = _build("dspark", tmp_path / "d", StubPolicy())
    docs = make_documents(["00111111", "0111"], original.spec.architecture)
    assert float(run_step(loaded, docs, [[0, 1]]).loss) == float(run_step(original, docs, [[0, 1]]).loss)
    loaded.export(str(tmp_path / "e"), StubPolicy())
    assert not copies.keys() & load_file(tmp_path / "e" / "model.safetensors").keys()


def test_older_domino_names_are_read(tmp_path: Path) -> None:
    state = domino_runtime().module.state_dict()
    nested = {f"logit_head.{n}": t for n, t in state.items() if n.startswith(("prefix_gru.", "embed_proj."))}
    assert len(nested) == 4
    dropped = {n.removeprefix("logit_head."): None for n in nested}
    original = _write(
        tmp_path / "d", "domino", written("domino", architectures=["DFlashDraftModel"]), **dropped, **nested
    )
    loaded = _build("domino", tmp_path / "d", StubPolicy()).module.state_dict()
    assert all(torch.equal(loaded[n], t) for n, t in original.module.state_dict().items())


@pytest.mark.parametrize("algo", ["dspark", "domino"])
def test_a_reduced_vocabulary_round_trip(tmp_path: Path, algo: str) -> None:
    """Heads have as many rows as the draft has ids, the policy's rows go along, the maps are in the file."""
    policy = StubPolicy()
    spec = resolve(algo, draft_vocab_size=9, vocab_ids=PERMUTED_IDS, policy={"head_dim": 8})
    cfg = CONFIGS[algo](enabled=True, mask_token_id=MASK, aux_layer_indices=[0, 2], draft_vocab_size=9)
    runtime = build_draft_runtime(cfg, spec, policy_model=policy, device="cpu", dtype="float32", draft_dir=None, seed=3)
    runtime.export(str(tmp_path / "a"), policy)
    stored = load_file(tmp_path / "a" / "model.safetensors")
    assert stored.keys() - set(spec.trained_names) == {"lm_head.weight", "d2t", "t2d"}
    last = {"dspark": "markov_head.markov_w2.weight", "domino": "embed_proj.2.weight"}[algo]
    assert stored[last].shape[0] == 9
    _build(algo, tmp_path / "a", policy).export(str(tmp_path / "b"), policy)
    again = load_file(tmp_path / "b" / "model.safetensors")
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[n], t) for n, t in stored.items())


def test_a_new_draft_starts_as_the_plain_block_draft() -> None:
    """The heads add next to nothing, and yet every tensor of them gets a gradient."""
    for algo, last in (("dspark", "markov_head.markov_w2.weight"), ("domino", "embed_proj.2.weight")):
        cfg = CONFIGS[algo](enabled=True, mask_token_id=MASK, aux_layer_indices=[0, 2], **_small(algo))
        spec = resolve(algo, **_small(algo))
        runtime = build_draft_runtime(
            cfg, spec, policy_model=StubPolicy(), device="cpu", dtype="float32", draft_dir=None, seed=3
        )
        docs = make_documents(["00111111", "0111"], spec.architecture)
        first = run_step(runtime, docs, [[0, 1]])
        with torch.no_grad():
            runtime.module.get_parameter(last).zero_()
        plain = run_step(runtime, docs, [[0, 1]])
        assert float(first.loss) == pytest.approx(float(plain.loss), rel=1e-3)
        assert all(bool(g.any()) for g in first.grads.values())


def _small(algo: str) -> dict[str, Any]:
    return {"base_loss_weight": 0.5, "base_loss_steps": 10**9} if algo == "domino" else {}
