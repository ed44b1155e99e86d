"""Drafts read from one directory and written to another: layouts, dtypes, fewer ids, repaired tables."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.models.automodel.draft.adapters.base import Verifier
from nemo_rl.models.automodel.draft.architecture import HEAD
from nemo_rl.models.automodel.draft.convert import (
    policy_head_rows,
    prune,
    read_published,
    with_dtype,
    write_published,
)
from nemo_rl.models.automodel.draft.models import dflash, domino, dspark, llama_eagle, peagle
from nemo_rl.models.automodel.draft.registry import (
    DRAFT_ALGORITHMS,
    adapter_of,
    algorithm_of,
    build_draft_runtime,
    resolve_spec,
)
from nemo_rl.models.automodel.draft.vocab import VocabMap
from tests.tiny_models import write_tiny_policy
from tests.unit.models.automodel.draft import published_autoregressive, published_block
from tests.unit.models.automodel.draft.algorithms import ALGORITHMS, MASK_TOKEN, K, config_for
from tests.unit.models.automodel.draft.helpers import to_microbatch
from tests.unit.models.automodel.draft.scenarios import make_batch

VOCAB = 320
IDS = (*range(3, 240, 4), 257)
REDUCIBLE = [algo for algo in ALGORITHMS if algo != "eagle1"]
VERIFIER = Verifier("some/policy", ("Qwen3ForCausalLM",))


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory) -> Path:
    return Path(write_tiny_policy(tmp_path_factory.mktemp("policy"), layers=4, heads=4, kv=2))


@pytest.fixture(scope="module")
def drafts(policy_dir, tmp_path_factory):
    """Algorithm and ids -> directory of a random draft in the native layout, made once."""
    root, made = tmp_path_factory.mktemp("drafts"), {}

    def directory(algo: str, ids: tuple[int, ...] | None = None) -> Path:
        if (algo, ids) not in made:
            made[algo, ids] = _write_random(root / f"{algo}-{len(made)}", policy_dir, algo, ids)
        return made[algo, ids]

    return directory


def _policy_config(policy_dir: Path) -> dict[str, Any]:
    return json.loads((policy_dir / "config.json").read_text())


def _write_random(directory: Path, policy_dir: Path, algo: str, ids: tuple[int, ...] | None) -> Path:
    changes = {} if ids is None else {"draft_vocab_size": len(ids)}
    spec = resolve_spec(
        config_for(algo, **changes),
        policy_config=_policy_config(policy_dir),
        k=K,
        max_model_len=64,
        dtype="float32",
        vocab_ids=ids,
    )
    arch, g = spec.architecture, torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in (arch.published_shapes() | arch.frozen_shapes()).items():
        noise = torch.randn(shape, generator=g)
        tensors[name] = 1 + 0.3 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
    if ids is not None:
        mapping = VocabMap(ids, VOCAB)
        tensors |= {"d2t": torch.tensor(mapping.d2t), "t2d": torch.tensor(mapping.t2d)}
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = adapter_of(algo).write_config(arch, dtype="float32")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return directory


def _read(directory: Path, algo: str, **kwargs: Any) -> Any:
    cfg = DRAFT_ALGORITHMS[algo].config(**kwargs.pop("settings", {}))
    return read_published(directory, adapter_of(algo), cfg, policy_config=None, **kwargs)


def _files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


# -- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [None, IDS], ids=["full", "reduced"])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_through_every_layout_and_back(drafts, tmp_path, algo, ids):
    """The files that this program writes are a fixed point, whatever layout lies in between."""
    if ids is not None and algo not in REDUCIBLE:
        return
    native = tmp_path / "native"
    write_published(native, _read(drafts(algo, ids), algo), layout="native", dtype="float32")
    for layout in adapter_of(algo).layouts:
        between, back = tmp_path / layout, tmp_path / f"{layout}-back"
        write_published(between, _read(native, algo), layout=layout, dtype="float32", k=K, verifier=VERIFIER)
        write_published(back, _read(between, algo), layout="native", dtype="float32")
        assert _files(back) == _files(native)
        stated = json.loads((between / "config.json").read_text()).get("speculators_model_type")
        assert stated == (algo if layout == "speculators" else None)
    stored = load_file(native / "model.safetensors")
    original = load_file(drafts(algo, ids) / "model.safetensors")
    assert stored.keys() == original.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in original.items())


def test_a_layout_that_an_algorithm_lacks_and_a_nameless_policy_are_refused(drafts, tmp_path):
    with pytest.raises(ConfigError, match=r"--layout: got 'speculators'; .* \['native'\]"):
        write_published(tmp_path, _read(drafts("eagle1"), "eagle1"), layout="speculators", dtype="float32")
    with pytest.raises(ConfigError, match=r"--policy: got nothing; the speculators layout names the policy"):
        write_published(tmp_path, _read(drafts("eagle3"), "eagle3"), layout="speculators", dtype="float32")
    draft = _read(drafts("dflash"), "dflash")
    with pytest.raises(ConfigError, match=r"--num-speculative-tokens: got 4; the draft proposes at most 3"):
        write_published(tmp_path, draft, layout="speculators", dtype="float32", k=4, verifier=VERIFIER)
    assert list(tmp_path.iterdir()) == []


def test_what_a_file_states_of_its_policy_is_stated_again(drafts, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    draft = _read(drafts("eagle3"), "eagle3")
    write_published(first, draft, layout="speculators", dtype="float32", k=2, verifier=VERIFIER)
    again = _read(first, "eagle3")
    assert (again.num_speculative_tokens, again.verifier) == (2, VERIFIER)
    write_published(second, again, layout="speculators", dtype="float32")
    assert _files(second) == _files(first)


def test_a_question_that_the_file_leaves_open_is_asked(drafts, tmp_path):
    for file, content in _files(drafts("eagle3")).items():
        (tmp_path / file).write_bytes(content)
    raw = json.loads((tmp_path / "config.json").read_text())
    for key in ("eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states", "eagle_config", "nemo_rl_draft"):
        raw.pop(key)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"aux_layer_indices: got null, and the draft's config\.json does not name"):
        _read(tmp_path, "eagle3")
    draft = _read(tmp_path, "eagle3", settings={"aux_layer_indices": (0, 1, 2)})
    assert draft.architecture.feature_ids == (1, 2, 3)


@pytest.mark.parametrize("name", sorted({*published_autoregressive.PUBLISHED, *published_block.LAYOUTS}))
def test_every_publishers_draft_becomes_one_that_needs_no_answers(tmp_path, name):
    home, made = published_autoregressive, published_autoregressive.PUBLISHED.get(name)
    if made is None:
        home, made = published_block, published_block.LAYOUTS[name]
    published = made()
    source, out = published.write(tmp_path / "source"), tmp_path / "out"
    first = read_published(
        source,
        adapter_of(published.algo),
        DRAFT_ALGORITHMS[published.algo].config(**published.settings),
        policy_config=home.POLICY,
    )
    write_published(out, first, layout="native", dtype="float32")
    assert algorithm_of(json.loads((out / "config.json").read_text())) == published.algo
    again = _read(out, published.algo)
    assert again.architecture.identity() == first.architecture.identity()
    assert (again.vocab, again.source.publisher) == (first.vocab, "nemo_rl")
    assert again.tensors.keys() == first.tensors.keys()
    assert all(torch.equal(t, again.tensors[key]) for key, t in first.tensors.items())
    write_published(tmp_path / "twice", again, layout="native", dtype="float32")
    assert _files(tmp_path / "twice") == _files(out)


# -- dtypes ----------------------------------------------------------------------------------------------------------


def test_weights_are_cast_but_for_those_that_the_engine_keeps_wide(drafts, tmp_path):
    draft = _read(drafts("dspark"), "dspark")
    assert draft.dtype == "float32"
    write_published(tmp_path, draft, layout="native", dtype="bfloat16")
    stored = load_file(tmp_path / "model.safetensors")
    wide = {name for name, t in stored.items() if t.dtype == torch.float32}
    assert wide == draft.architecture.wide_names() != frozenset()
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert _read(tmp_path, "dspark").dtype == "bfloat16"
    mixed = dataclasses.replace(draft, tensors={**draft.tensors, "fc.weight": draft.tensors["fc.weight"].half()})
    assert mixed.dtype is None
    large = dataclasses.replace(draft, tensors={**draft.tensors, "fc.weight": draft.tensors["fc.weight"] * 1e6})
    with pytest.raises(CheckpointError, match=r"\['fc\.weight'\] hold values that float16 cannot hold"):
        with_dtype(large, "float16")


# -- fewer ids -------------------------------------------------------------------------------------------------------


def _logits(monkeypatch, policy_dir: Path, directory: Path, algo: str) -> torch.Tensor:
    """Logits [E, D] of the module's own forward and loss on the policy's real features."""
    found = []
    homes = {"eagle3": llama_eagle, "peagle": peagle, "dflash": dflash, "dspark": dspark, "domino": domino}
    module = homes[algo]
    name = "soft_distillation" if hasattr(module, "soft_distillation") else "block_loss"
    original = getattr(module, name)

    def spy(hidden, head, teacher, *, correction=None, **kwargs):
        logits = hidden @ head.T
        found.append(logits if correction is None else logits + correction.latent @ correction.weight.T)
        more = {} if name == "soft_distillation" else {"correction": correction}
        return original(hidden, head, teacher, **kwargs, **more)

    monkeypatch.setattr(module, name, spy)
    cfg = config_for(algo, model_name=str(directory))
    policy = AutoModelForCausalLM.from_pretrained(policy_dir, attn_implementation="sdpa")
    spec = resolve_spec(cfg, policy_config=policy.config.to_dict(), k=K, max_model_len=64, dtype="float32")
    runtime = build_draft_runtime(
        cfg, spec, policy_model=policy, device="cpu", dtype="float32", draft_dir=str(directory), seed=1
    )
    batch = make_batch()
    mb = to_microbatch(batch, list(range(batch.size)))
    runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=policy)
    with torch.no_grad():
        with runtime.capture(policy):
            policy_logits = policy(input_ids=mb.input_ids, position_ids=mb.position_ids, use_cache=False).logits
        runtime.loss(mb, policy_logits)
    monkeypatch.setattr(module, name, original)
    return torch.cat(found)


@pytest.mark.parametrize("algo", REDUCIBLE)
def test_a_reduced_draft_has_the_old_logits_of_the_kept_ids(monkeypatch, drafts, policy_dir, tmp_path, algo):
    draft = _read(drafts(algo), algo)
    vocab = VocabMap(IDS, VOCAB)

    def rows(ids):
        return policy_head_rows(policy_dir, ids)

    if HEAD not in draft.tensors:
        with pytest.raises(ConfigError, match="--policy: got nothing; a draft of algorithm"):
            prune(draft, vocab)
    middle = VocabMap(tuple(sorted({*IDS, *range(0, VOCAB - 1, 3)})), VOCAB)
    once, twice = prune(draft, vocab, policy_rows=rows), prune(prune(draft, middle, policy_rows=rows), vocab)
    assert once.architecture == twice.architecture
    assert once.tensors.keys() == twice.tensors.keys()
    assert all(torch.equal(t, twice.tensors[name]) for name, t in once.tensors.items())

    write_published(tmp_path / "reduced", once, layout="native", dtype="float32")
    whole = _logits(monkeypatch, policy_dir, drafts(algo), algo)
    reduced = _logits(monkeypatch, policy_dir, tmp_path / "reduced", algo)
    assert whole.shape[1] == VOCAB
    torch.testing.assert_close(reduced, whole[:, list(IDS)], rtol=1e-5, atol=1e-5)
    stored = load_file(tmp_path / "reduced" / "model.safetensors")
    assert (torch.arange(len(IDS)) + stored["d2t"]).tolist() == list(IDS)


def test_a_reduced_draft_may_be_permuted_and_stays_so(drafts):
    ids = tuple(reversed(IDS))
    draft = _read(drafts("eagle3", ids), "eagle3")
    assert draft.vocab.ids == ids
    kept = prune(draft, VocabMap(IDS[:9], VOCAB))
    assert torch.equal(kept.tensors[HEAD], draft.tensors[HEAD][[ids.index(v) for v in IDS[:9]]])


def test_ids_that_cannot_be_kept_are_refused(drafts):
    draft = _read(drafts("dflash", IDS), "dflash")
    with pytest.raises(ConfigError, match=r"--vocab: 1 of 2 ids are not in the map of 61, first \[4\]"):
        prune(draft, VocabMap((3, 4), VOCAB))
    with pytest.raises(ConfigError, match=r"--vocab: one map is of 320 target ids, the other of 321"):
        prune(draft, VocabMap(IDS[:3], VOCAB + 1))
    with pytest.raises(ConfigError, match="got 61 ids, which the draft has already"):
        prune(draft, VocabMap(IDS, VOCAB))
    with pytest.raises(ConfigError, match=f"holds {MASK_TOKEN}, the draft's placeholder"):
        prune(_read(drafts("dflash"), "dflash"), VocabMap((3, MASK_TOKEN), VOCAB))
    with pytest.raises(ConfigError, match="eagle1 draft uses the policy's head"):
        prune(_read(drafts("eagle1"), "eagle1"), VocabMap(IDS, VOCAB))


def test_rows_of_the_policys_head(policy_dir, tmp_path):
    head = load_file(policy_dir / "model.safetensors")["lm_head.weight"]
    assert torch.equal(policy_head_rows(policy_dir, [7, 2]), head[[7, 2]])
    tied = Path(write_tiny_policy(tmp_path / "tied", layers=1, tie=True))
    embedding = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(policy_head_rows(tied, [1]), embedding[[1]])
    with pytest.raises(CheckpointError, match="has 320 rows, row 320 is asked for"):
        policy_head_rows(tied, [320])


# -- repaired tables -------------------------------------------------------------------------------------------------


def _with_tables(source: Path, out: Path, **tables: torch.Tensor | None) -> Path:
    out.mkdir()
    tensors = {name: t for name, t in load_file(source / "model.safetensors").items() if name not in tables}
    tensors |= {name: t for name, t in tables.items() if t is not None}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_bytes((source / "config.json").read_bytes())
    return out


@pytest.mark.parametrize("algo", ["eagle3", "dspark"])
def test_target_ids_become_offsets(drafts, tmp_path, algo):
    source = drafts(algo, IDS)
    good = _read(source, algo)
    broken = _with_tables(source, tmp_path / "broken", d2t=torch.tensor(IDS))
    with pytest.raises(CheckpointError, match=r"t2d and d2t disagree.*--repair-d2t"):
        _read(broken, algo)
    repaired = _read(broken, algo, repair="auto")
    assert repaired.vocab == good.vocab
    write_published(tmp_path / "repaired", repaired, layout="native", dtype="float32")
    write_published(tmp_path / "good", good, layout="native", dtype="float32")
    assert _files(tmp_path / "repaired") == _files(tmp_path / "good")
    with pytest.raises(ConfigError, match=r"--repair-d2t: .*d2t holds offsets, as it must \(ids \[3, 7, 11\]"):
        _read(tmp_path / "repaired", algo, repair="auto")


def test_without_t2d_only_the_user_can_tell(drafts, tmp_path):
    broken = _with_tables(drafts("eagle3", IDS), tmp_path / "broken", d2t=torch.tensor(IDS), t2d=None)
    with pytest.raises(ConfigError, match=r"can be read as offsets .* no t2d to tell.*--d2t-is-absolute"):
        _read(broken, "eagle3", repair="auto")
    assert _read(broken, "eagle3", repair="absolute").vocab.ids == IDS
    late = tuple(range(VOCAB - 1 - len(IDS), VOCAB - 1))
    far = _with_tables(drafts("eagle3", IDS), tmp_path / "far", d2t=torch.tensor(late), t2d=None)
    assert _read(far, "eagle3", repair="auto").vocab.ids == late


def test_arange_of_the_whole_vocabulary_is_dropped(drafts, tmp_path):
    source = drafts("eagle3")
    broken = _with_tables(source, tmp_path / "broken", d2t=torch.arange(VOCAB))
    with pytest.raises(CheckpointError, match="so the identity is all zeros, not arange"):
        _read(broken, "eagle3")
    repaired = _read(broken, "eagle3", repair="auto")
    assert repaired.vocab is None
    write_published(tmp_path / "out", repaired, layout="native", dtype="float32")
    assert "d2t" not in load_file(tmp_path / "out" / "model.safetensors")
    swapped = _with_tables(source, tmp_path / "swapped", d2t=torch.tensor([1, 0, *range(2, VOCAB)]))
    with pytest.raises(ConfigError, match="proposes every id, in another order"):
        _read(swapped, "eagle3", repair="auto")
    with pytest.raises(ConfigError, match="has no d2t to repair"):
        _read(source, "eagle3", repair="auto")
