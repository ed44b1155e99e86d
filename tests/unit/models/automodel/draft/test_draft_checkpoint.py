"""Directories of a draft: layouts, shards, metadata, interrupted writes, damage."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.models.automodel.draft import checkpoint, metadata
from nemo_rl.models.automodel.draft.builders import load_tensors
from nemo_rl.models.automodel.draft.checkpoint import (
    META_FILE,
    check_meta,
    load_weights,
    read_meta,
    verify_files,
    write_draft,
)
from nemo_rl.models.automodel.draft.config import Eagle3DraftConfig
from nemo_rl.models.automodel.draft.registry import build_draft_runtime, resolve_spec
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.utils.config import build_master_config
from tests.tiny_models import write_tiny_policy
from tests.unit.models.automodel.draft.algorithms import MASK_TOKEN, K, config_for
from tests.unit.models.automodel.draft.helpers import StubPolicy, make_arch, make_runtime

CFG = Eagle3DraftConfig(enabled=True, ttt_steps=3)
IDS = [5, 2, 19, 20]
VOCAB = 320
TWO_LAYOUTS = ["dflash", "dspark", "eagle3", "peagle"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    directory = write_tiny_policy(tmp_path_factory.mktemp("policy"), layers=4)
    return AutoModelForCausalLM.from_pretrained(directory).eval()


def make(
    policy: torch.nn.Module, algo: str, *, draft_dir: str | None = None, ids: list[int] | None = None, **changes: Any
) -> Any:
    """A draft of the tiny policy."""
    cfg = config_for(algo, model_name=draft_dir, **changes)
    spec = resolve_spec(
        cfg, policy_config=policy.config.to_dict(), k=K, max_model_len=64, dtype="float32", vocab_ids=ids
    )
    return build_draft_runtime(
        cfg, spec, policy_model=policy, device="cpu", dtype="float32", draft_dir=draft_dir, seed=0
    )


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# -- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_reduced", [False, True], ids=["full", "reduced"])
@pytest.mark.parametrize("algo", TWO_LAYOUTS)
def test_both_layouts_hold_the_same_draft_and_are_read_back(
    tmp_path: Path, policy: torch.nn.Module, algo: str, is_reduced: bool
) -> None:
    reduced = {"draft_vocab_size": 200, "ids": [i for i in range(300) if i % 3]}
    runtime = make(policy, algo, **(reduced if is_reduced else {}))
    for layout in ("native", "speculators"):
        runtime.export(str(tmp_path / layout), policy, layout=layout)
        assert read_meta(tmp_path / layout)["layout"] == layout
    native, other = (contents(tmp_path / name) for name in ("native", "speculators"))
    assert native["model.safetensors"] == other["model.safetensors"]
    config = json.loads(other["config.json"])
    assert config["speculators_model_type"] == algo
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == K
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": policy.config.name_or_path,
        "architectures": ["Qwen3ForCausalLM"],
    }
    # What is read back has a `model_name`, and settings that a file states need not be repeated.
    again = make(policy, algo, draft_dir=str(tmp_path / "speculators"))
    assert again.spec.architecture.identity() == runtime.spec.architecture.identity()
    again.export(str(tmp_path / "again"), policy)
    assert contents(tmp_path / "again")["model.safetensors"] == native["model.safetensors"]


def test_a_layout_that_the_algorithm_does_not_have_is_refused_before_the_run(policy: torch.nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"policy\.draft\.export_layouts: got speculators; .*eagle1.*native"):
        make(policy, "eagle1", export_layouts=["native", "speculators"])


# -- shards ----------------------------------------------------------------------------------------------------------


def draft_tensors(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, 8, generator=g) for name, size in (("c", 40), ("a", 10), ("b", 10), ("d", 1))}


def read_all(directory: Path) -> dict[str, Tensor]:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    tensors = {}
    for file in sorted(set(index["weight_map"].values())):
        part = load_file(directory / file)
        assert all(index["weight_map"][name] == file for name in part)
        tensors |= part
    assert index["metadata"] == {"total_size": sum(t.numel() * t.element_size() for t in tensors.values())}
    return tensors


def test_large_weights_are_sharded_with_an_index_as_transformers_writes_it(tmp_path: Path) -> None:
    tensors = draft_tensors()
    write_draft(tmp_path, tensors, config={"x": 1}, max_shard_bytes=700)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(contents(tmp_path)) == ["config.json", *names, "model.safetensors.index.json"]
    # In the order of names; the large one has a file of its own.
    assert [sorted(load_file(tmp_path / name)) for name in names] == [["a", "b"], ["c"], ["d"]]
    stored = read_all(tmp_path)
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())


def test_the_order_of_tensors_and_the_sharding_written_before_leave_no_trace(tmp_path: Path) -> None:
    tensors = draft_tensors()
    write_draft(tmp_path / "a", tensors, config={"x": 1, "y": 2})
    for limit in (100, 700, 400, 1 << 20):
        write_draft(tmp_path / "b", draft_tensors(seed=1), config={}, max_shard_bytes=limit)
        write_draft(tmp_path / "c", dict(reversed(tensors.items())), config={"y": 2, "x": 1}, max_shard_bytes=limit)
    write_draft(tmp_path / "b", dict(reversed(tensors.items())), config={"y": 2, "x": 1})
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")
    assert sorted(contents(tmp_path / "a")) == ["config.json", "model.safetensors"]


def test_a_sharded_export_is_loaded_and_exported_again_byte_for_byte(
    tmp_path: Path, policy: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(checkpoint.save_draft.__kwdefaults__, "max_shard_bytes", 60_000)
    ids = list(range(7, 207))
    runtime = make(policy, "eagle3", draft_vocab_size=200, ids=ids)
    runtime.export(str(tmp_path / "a"), policy)
    assert len(list((tmp_path / "a").glob("model-*-of-*.safetensors"))) > 2
    again = make(policy, "eagle3", draft_dir=str(tmp_path / "a"))
    again.export(str(tmp_path / "b"), policy)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    tensors = load_tensors(tmp_path / "b", again.spec.architecture, trust_pickle=False)
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["d2t"].tolist() == [7] * 200
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero().flatten().tolist() == ids


# -- interrupted writes ----------------------------------------------------------------------------------------------


class Killed(Exception):
    """Stands for the end of the process: nothing of the writer runs after it."""


@pytest.mark.parametrize("old_has_metadata", [True, False], ids=["ours", "another's"])
@pytest.mark.parametrize(
    ("limits", "is_first"), [((1 << 20, 1 << 20), True), ((1 << 20, 200), False), ((200, 1 << 20), False)]
)
def test_an_interrupted_write_leaves_an_old_a_new_or_a_refused_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], is_first: bool, old_has_metadata: bool
) -> None:
    """Stops before every operation that changes a name in the directory."""
    meta = {"format_version": 2, "algo": "x", "spec": {}}
    old, new = ({"config": {"n": n}, "tensors": draft_tensors(n), "meta": meta} for n in (1, 2))
    old["meta"] = meta if old_has_metadata else None

    def write(directory: Path, draft: dict[str, Any], limit: int) -> None:
        write_draft(directory, draft["tensors"], config=draft["config"], max_shard_bytes=limit, meta=draft["meta"])

    def state(directory: Path) -> str:
        """Which draft a reader sees."""
        has_meta = (directory / META_FILE).exists()
        try:
            verify_files(directory)
        except CheckpointError:
            return "refused"
        names = [p.name for p in directory.iterdir() if metadata.is_weight_file(p.name)]
        if not has_meta and ("config.json" not in contents(directory) or not is_whole(directory, names)):
            return "none"
        n = json.loads((directory / "config.json").read_text())["n"]
        stored = {
            name: t for file in names if file.endswith("tensors") for name, t in load_file(directory / file).items()
        }
        assert all(torch.equal(stored[name], tensor) for name, tensor in draft_tensors(n).items())
        assert len(stored) == 4
        return {1: "old", 2: "new"}[n]

    def is_whole(directory: Path, names: list[str]) -> bool:
        return "model.safetensors" in names or "model.safetensors.index.json" in names

    seen = []
    for stop in range(1, 100):
        directory = tmp_path / str(stop)
        if not is_first:
            write(directory, old, limits[0])
        left = iter(range(stop, 0, -1))
        with monkeypatch.context() as patch:
            for name in ("replace", "unlink"):
                patch.setattr(Path, name, stopping(getattr(Path, name), left))
            try:
                write(directory, new, limits[1])
                is_done = True
            except Killed:
                is_done = False
        seen.append(state(directory))
        if is_done:
            break
        write(directory, new, limits[1])
        assert state(directory) == "new", "what an interrupted write left must not stand in the way of the next"
        assert not list(directory.glob("*.partial"))
        shutil.rmtree(directory)
    assert seen[-1] == "new"
    assert set(seen) == ({"none", "new"} if is_first else {"old", "refused", "new"})


def stopping(method: Callable[..., Any], left: Any) -> Callable[..., Any]:
    def wrapped(self: Path, *args: Any, **kwargs: Any) -> Any:
        if next(left) == 1:
            raise Killed
        return method(self, *args, **kwargs)

    return wrapped


def test_a_write_that_fails_leaves_the_old_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_runtime(make_arch(), CFG).export(str(tmp_path), StubPolicy())
    before = contents(tmp_path)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(CheckpointError, match=r"could not be written .No space left"):
            make_runtime(make_arch(), CFG, seed=3).export(str(tmp_path), StubPolicy())
    verify_files(tmp_path)
    assert {name: before[name] for name in before} == {name: contents(tmp_path)[name] for name in before}


# -- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 0x01
    path.write_bytes(data)


@pytest.mark.parametrize("pattern", ["config.json", META_FILE, "model-00002-of-*.safetensors", "*.index.json"])
def test_a_flipped_byte_in_a_draft_directory_is_found_before_it_is_used(
    tmp_path: Path, policy: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    monkeypatch.setitem(checkpoint.save_draft.__kwdefaults__, "max_shard_bytes", 120_000)
    make(policy, "eagle3").export(str(tmp_path / "draft"), policy)
    name = next((tmp_path / "draft").glob(pattern)).name
    make(policy, "eagle3", draft_dir=str(tmp_path / "draft"))
    for at in (0.3, 0.5, 0.97):
        copy = shutil.copytree(tmp_path / "draft", tmp_path / f"copy_{at}")
        flip(copy / name, at)
        with pytest.raises(ConfigError, match=rf"policy\.draft\.model_name: .*{copy.name}"):
            make(policy, "eagle3", draft_dir=str(copy))
        with pytest.raises(CheckpointError, match=name):
            verify_files(copy)


def test_a_flipped_byte_anywhere_in_the_metadata_is_found(tmp_path: Path) -> None:
    make_runtime(make_arch(), CFG).export(str(tmp_path), StubPolicy())
    whole = (tmp_path / META_FILE).read_bytes()
    plain = json.loads(whole)
    for at in range(0, len(whole), 5):
        (tmp_path / META_FILE).write_bytes(whole[:at] + bytes([whole[at] ^ 0x01]) + whole[at + 1 :])
        try:
            same = json.loads((tmp_path / META_FILE).read_bytes()) == plain  # white space
        except ValueError:
            same = False
        if not same:
            with pytest.raises(CheckpointError, match=META_FILE):
                verify_files(tmp_path)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda d: (d / "config.json").unlink(), r"config.json: is missing"),
        (lambda d: (d / "config.json").write_text("{}"), r"config.json: has 2 bytes; \d+ were written"),
        (lambda d: (d / "model-00001-of-00001.safetensors").touch(), "which this program did not write"),
        (lambda d: (d / "model.safetensors.index.json").touch(), "which this program did not write"),
        (lambda d: (d / META_FILE).write_text(json.dumps(metadata.incomplete())), "was interrupted"),
        (lambda d: (d / META_FILE).write_text("[]"), "must be an object"),
    ],
    ids=["missing", "short", "added", "index", "incomplete", "no_object"],
)
def test_files_that_are_not_those_written_are_refused(
    tmp_path: Path, damage: Callable[[Path], Any], match: str
) -> None:
    make_runtime(make_arch(), CFG).export(str(tmp_path), StubPolicy())
    verify_files(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=match):
        verify_files(tmp_path)


def test_a_directory_of_another_program_has_nothing_to_verify(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    verify_files(tmp_path)
    (tmp_path / META_FILE).write_text(json.dumps({"format_version": 1, "algo": "x", "spec": {}}))
    verify_files(tmp_path)


# -- metadata --------------------------------------------------------------------------------------------------------


def policy_config(**draft: Any) -> PolicyConfig:
    tree = {"enabled": True, "algo": "eagle3", "ttt_steps": 3, "serve": False, **draft}
    return build_master_config({"cluster": {"device": "cpu"}, "policy": {"model_name": "x", "draft": tree}}).policy


def test_metadata_names_every_field_that_differs(tmp_path: Path) -> None:
    runtime = make_runtime(make_arch(draft_vocab_size=4), CFG, ids=IDS)
    runtime.export(str(tmp_path), StubPolicy())
    check_meta(tmp_path, runtime.spec, runtime._vocab)
    assert set(load_weights(tmp_path, runtime.spec, runtime._vocab)) == set(runtime.spec.trained_names)
    other = make_runtime(make_arch(draft_vocab_size=4, head_dim=16, norm_output=True), CFG, ids=[1, 2, 3, 4])
    with pytest.raises(CheckpointError, match=r"policy\.draft\.restart: true") as err:
        check_meta(tmp_path, other.spec, other._vocab)
    for field in ("head_dim: 8, this run 16", "norm_output: false, this run true", "vocab_ids: [5, 2, 19, 20], this"):
        assert field in str(err.value)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format_version": 7}, "format_version 7; this program reads 2"),
        ({"format_version": None}, "format_version None"),
        ({"spec": None, "format_version": 1, "checksum": None}, "is corrupted"),
    ],
)
def test_metadata_that_cannot_be_read_is_refused(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    make_runtime(make_arch(), CFG).export(str(tmp_path), StubPolicy())
    meta = json.loads((tmp_path / META_FILE).read_text())
    (tmp_path / META_FILE).write_text(json.dumps(meta | change))
    with pytest.raises(CheckpointError, match=match):
        read_meta(tmp_path)
    (tmp_path / META_FILE).unlink()
    with pytest.raises(CheckpointError, match="holds no draft"):
        read_meta(tmp_path)


def test_the_optimizers_layout_is_compared_but_not_its_rates() -> None:
    spec = make_runtime(make_arch(), CFG).spec
    wanted = metadata.optimizer_layout(policy_config(), spec)
    meta = metadata.describe(spec, vocab_ids=None, optimizer=wanted)
    assert wanted["groups"]["vectors"] == sorted(n for n in spec.trained_names if "norm" in n)

    def differing(spec: Any = spec, **optimizer: Any) -> str:
        own = metadata.optimizer_layout(policy_config(optimizer=optimizer), spec)
        return "; ".join(metadata.differences(meta, metadata.describe(spec, vocab_ids=None, optimizer=own)))

    assert differing(kwargs={"lr": 1.0, "betas": [0.5, 0.9]}) == ""
    assert differing(kwargs={"lr": 1.0, "amsgrad": True}) == 'optimizer.state_options: [], this run ["amsgrad"]'
    assert 'optimizer.class: "torch.optim.AdamW", this run "torch.optim.SGD"' in differing(name="torch.optim.SGD")
    frozen = dataclasses.replace(spec, frozen=("norm.weight",))
    assert 'optimizer.groups.vectors: 4 entries, of which only here "norm.weight", this run' in differing(frozen)
    assert differing(dataclasses.replace(spec, is_static=True)) == 'optimizer: "trained", this run null'


def test_a_field_that_the_file_does_not_know_is_no_difference() -> None:
    """Older files say less, see the mask token of a resumed block draft."""
    spec = make_runtime(make_arch(), CFG).spec
    wanted = metadata.describe(spec, vocab_ids=None, optimizer=None)
    stored = json.loads(json.dumps(wanted))
    del stored["spec"]["head_dim"], stored["optimizer"]
    assert metadata.differences(stored, wanted) == []


@pytest.mark.parametrize("algo", ["dflash", "dspark", "domino", "peagle"])
def test_another_placeholder_is_refused(policy: torch.nn.Module, algo: str) -> None:
    def described(token: int) -> dict[str, Any]:
        return metadata.describe(make(policy, algo, mask_token_id=token).spec, vocab_ids=None, optimizer=None)

    assert metadata.differences(described(MASK_TOKEN), described(MASK_TOKEN - 1)) == [
        f"mask_token_id: {MASK_TOKEN}, this run {MASK_TOKEN - 1}"
    ]
    stored = described(MASK_TOKEN)
    del stored["spec"]["mask_token_id"]
    assert metadata.differences(stored, described(MASK_TOKEN - 1)) == []
