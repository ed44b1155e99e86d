"""The draft vocabulary: offsets, masks, selection, its file; from the file to a trained and exported draft."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from nemo_rl.data.token_counts import count_tokens
from nemo_rl.data.tokenizer_identity import tokenizer_fingerprint
from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.registry import resolve_spec
from nemo_rl.models.automodel.draft.vocab import (
    VocabMap,
    VocabMapError,
    coverage_by_size,
    coverage_of,
    read_either,
    select_vocab,
    selection_order,
    table_problems,
)
from nemo_rl.models.automodel.draft.vocab_file import (
    VocabFile,
    read_vocab_file,
    stop_ids,
    write_vocab_file,
)
from tests.unit.models.automodel.draft.algorithms import MASK_TOKEN, K, config_for
from tests.unit.models.automodel.draft.scenarios import draft_step

PROPERTY = settings(derandomize=True, max_examples=50, deadline=None, database=None)
SIZE = 24
"""Target ids of the properties."""
COUNTS = st.dictionaries(st.integers(0, SIZE - 1), st.integers(0, 9), min_size=1)
IDS = st.lists(st.integers(0, SIZE - 1), min_size=1, unique=True)


def test_tables_hold_offsets_and_presence():
    mapping = VocabMap((3, 9, 17, 21), 32)
    assert mapping.d2t == [3, 8, 15, 18]
    assert [i for i, flag in enumerate(mapping.t2d) if flag] == [3, 9, 17, 21]


def test_identity_is_all_zeros():
    mapping = VocabMap(tuple(range(32)), 32)
    assert mapping.d2t == [0] * 32
    assert mapping.is_identity


@pytest.mark.parametrize("seed", range(4))
def test_round_trip_through_the_engines_formula(seed):
    ids = random.Random(seed).sample(range(50), 20)
    mapping = VocabMap(tuple(ids), 50)
    engine = [i + offset for i, offset in enumerate(mapping.d2t)]
    assert engine == ids
    again = VocabMap.from_tables(mapping.d2t, vocab_size=50, draft_vocab_size=20, t2d=mapping.t2d)
    assert again == mapping
    assert mapping.is_ascending == (ids == sorted(ids))


def test_arange_offsets_are_refused():
    """A table of `arange` (target id 2 i) is the fault of writers that take the offsets for ids."""
    with pytest.raises(VocabMapError, match=r"lie outside.*62.*offsets.*zeros, not arange"):
        VocabMap.from_tables(list(range(32)), vocab_size=32, draft_vocab_size=32)


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ((1, 1, 2), "distinct"),
        ((-1, 2), "outside"),
        ((5, 32), "outside"),
        ((), "1 to 32"),
        (tuple(range(33)), "1 to 32"),
    ],
)
def test_impossible_maps_are_refused(ids, match):
    with pytest.raises(VocabMapError, match=match):
        VocabMap(ids, 32)


def test_tables_must_agree():
    mapping = VocabMap((3, 9), 12)
    wrong = mapping.t2d
    wrong[4] = True
    with pytest.raises(VocabMapError, match=r"disagree about 1 target ids, first \[4\]"):
        VocabMap.from_tables(mapping.d2t, vocab_size=12, draft_vocab_size=2, t2d=wrong)
    with pytest.raises(VocabMapError, match="d2t has 2 entries, draft_vocab_size is 3"):
        VocabMap.from_tables(mapping.d2t, vocab_size=12, draft_vocab_size=3)
    with pytest.raises(VocabMapError, match="t2d has 11 entries"):
        VocabMap.from_tables(mapping.d2t, vocab_size=12, draft_vocab_size=2, t2d=wrong[:-1])
    assert VocabMap.from_mask(mapping.t2d) == mapping


def test_selection_is_by_frequency_with_forced_ids_and_ascending():
    counts = {7: 10, 3: 5, 9: 5, 1: 1, 2: 1}
    chosen = select_vocab(counts, draft_vocab_size=4, vocab_size=16, always=[15], min_coverage=0.5)
    assert chosen.ids == (3, 7, 9, 15)
    filled = select_vocab({7: 1}, draft_vocab_size=4, vocab_size=16)
    assert filled.ids == (0, 1, 2, 7)
    with pytest.raises(VocabMapError, match=r"cover 0\.4545 of the counted tokens, .*; 4 ids do"):
        select_vocab(counts, draft_vocab_size=1, vocab_size=16)
    with pytest.raises(VocabMapError, match="2 ids must be in"):
        select_vocab(counts, draft_vocab_size=1, vocab_size=16, always=[1, 2])


def test_ids_that_are_never_proposed_are_neither_chosen_nor_filled_in():
    chosen = select_vocab({2: 9, 5: 1}, draft_vocab_size=3, vocab_size=8, never=[2, 0, 7], min_coverage=0.0)
    assert chosen.ids == (1, 3, 5)
    with pytest.raises(VocabMapError, match="has 1 to 5 ids here, got 6"):
        select_vocab({5: 1}, draft_vocab_size=6, vocab_size=8, never=[2, 0, 7])
    with pytest.raises(VocabMapError, match=r"ids \[2\] must be in and must not be proposed"):
        select_vocab({5: 1}, draft_vocab_size=3, vocab_size=8, always=[2], never=[2])
    with pytest.raises(VocabMapError, match=r"ids \[8\] lie outside"):
        select_vocab({8: 1}, draft_vocab_size=3, vocab_size=8)
    with pytest.raises(VocabMapError, match="no token was counted"):
        select_vocab({5: 0}, draft_vocab_size=3, vocab_size=8)


def test_every_violation_of_the_tables_is_listed():
    mapping = VocabMap((3, 9, 17, 21), 32)
    assert table_problems(mapping.d2t, vocab_size=32, draft_vocab_size=4, t2d=mapping.t2d) == []
    flags = [v in (3, 9, 11) for v in range(31)]
    assert table_problems([3, 2, 40, 18], vocab_size=32, draft_vocab_size=5, t2d=flags) == [
        "d2t has 4 entries, draft_vocab_size is 5",
        "1 ids lie outside 0..31, first [42]",
        "1 ids occur more than once, first [3]",
        "t2d has 31 entries, the target vocabulary 32",
        "t2d flags 3 ids, draft_vocab_size is 5",
        "2 ids are in t2d and not in d2t, first [9, 11]",
        "2 ids are in d2t and not in t2d, first [21, 42]",
    ]


def test_a_table_of_target_ids_is_told_from_offsets():
    def read(d2t, t2d=None, size=32, **kwargs):
        return read_either(d2t, vocab_size=size, draft_vocab_size=len(d2t), t2d=t2d, **kwargs)

    assert read([3, 9, 17, 30]) == (VocabMap((3, 9, 17, 30), 32), "absolute")
    assert read([0, 0, 5, 5]) == (VocabMap((0, 1, 7, 8), 32), "offsets")
    assert read(list(range(32))).vocab.is_identity
    assert read([0] * 32) == (VocabMap(tuple(range(32)), 32), "offsets")
    with pytest.raises(VocabMapError, match=r"as offsets \(ids \[3, 9, 17\].*target ids \(\[3, 8, 15\].*no t2d"):
        read([3, 8, 15, 18])
    for kind, ids in (("offsets", (3, 9, 17, 21)), ("absolute", (3, 8, 15, 18))):
        assert read([3, 8, 15, 18], VocabMap(ids, 32).t2d) == (VocabMap(ids, 32), kind)
    assert read([3, 8, 15, 18], is_absolute=True).vocab.ids == (3, 8, 15, 18)
    with pytest.raises(VocabMapError, match=r"no draft vocabulary; as offsets: .*; as target ids: "):
        read([5, 5, 40, 1])


# -- properties ------------------------------------------------------------------------------------------------------


@PROPERTY
@given(IDS)
def test_property_round_trip(ids):
    mapping = VocabMap(tuple(ids), SIZE)
    assert (torch.arange(len(ids)) + torch.tensor(mapping.d2t)).tolist() == ids
    again = VocabMap.from_tables(mapping.d2t, vocab_size=SIZE, draft_vocab_size=len(ids), t2d=mapping.t2d)
    assert again == mapping
    assert VocabMap.from_mask(mapping.t2d).ids == tuple(sorted(ids))


@PROPERTY
@given(COUNTS, st.randoms(use_true_random=False), st.integers(1, SIZE))
def test_property_selection_does_not_depend_on_the_order_of_counting(counts, rng, size):
    assume(sum(counts.values()))
    items = list(counts.items())
    rng.shuffle(items)
    dense = {v: counts.get(v, 0) for v in range(SIZE)}
    chosen = [
        select_vocab(c, draft_vocab_size=size, vocab_size=SIZE, min_coverage=0.0) for c in (counts, dict(items), dense)
    ]
    assert chosen[0] == chosen[1] == chosen[2]
    least = min(dense[v] for v in chosen[0].ids)
    left_out = [v for v in range(SIZE) if v not in chosen[0].ids]
    assert all(dense[v] <= least for v in left_out)
    assert all(v > u for v in left_out for u in chosen[0].ids if dense[v] == dense[u] == least)


@PROPERTY
@given(st.lists(st.lists(st.integers(0, SIZE - 1), max_size=8), min_size=1, max_size=5), st.data())
def test_property_counts_do_not_depend_on_the_split(rows, data):
    tokens = [v for row in rows for v in row]
    mask = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    whole = count_tokens(torch.tensor(tokens, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool), vocab_size=SIZE)
    parts, begin = torch.zeros(SIZE, dtype=torch.int64), 0
    for row in rows:
        part = slice(begin, begin + len(row))
        begin += len(row)
        ids, keep = torch.tensor(row, dtype=torch.int64), torch.tensor(mask[part], dtype=torch.float32)
        parts += count_tokens(ids, keep, vocab_size=SIZE)
    assert whole.dtype == torch.int64
    assert whole.tolist() == parts.tolist()
    expected = Counter(v for v, keep in zip(tokens, mask, strict=True) if keep)
    assert {v: n for v, n in enumerate(whole.tolist()) if n} == expected


@PROPERTY
@given(COUNTS, st.sets(st.integers(0, SIZE - 1), max_size=4))
def test_property_coverage_grows_with_the_size(counts, always):
    assume(sum(counts.values()))
    order = selection_order(counts, vocab_size=SIZE, always=always)
    shares = coverage_by_size(counts, order, range(1, SIZE + 1))
    assert list(shares) == list(range(1, SIZE + 1))
    assert all(a <= b for a, b in zip(shares.values(), list(shares.values())[1:], strict=False))
    assert shares[SIZE] == 1.0
    for size in range(max(1, len(always)), SIZE + 1):
        chosen = select_vocab(counts, draft_vocab_size=size, vocab_size=SIZE, always=always, min_coverage=0.0)
        assert coverage_of(counts, chosen.ids) == shares[size]


@PROPERTY
@given(IDS, st.data())
def test_property_pruning_twice_is_pruning_once(ids, data):
    middle = data.draw(st.lists(st.sampled_from(ids), min_size=1, unique=True))
    small = data.draw(st.lists(st.sampled_from(middle), min_size=1, unique=True))
    full, mid, end = (VocabMap(tuple(x), SIZE) for x in (ids, middle, small))
    head = torch.arange(SIZE)[ids] * 10
    once = head[full.rows_of(end)]
    assert once.tolist() == head[full.rows_of(mid)][mid.rows_of(end)].tolist() == [10 * v for v in small]
    outside = sorted(set(range(SIZE)) - set(ids))
    if outside:
        with pytest.raises(VocabMapError, match="1 of 1 ids are not in the map"):
            full.rows_of(VocabMap((outside[0],), SIZE))


@PROPERTY
@given(IDS)
def test_property_repairing_twice_is_repairing_once(ids):
    mapping = VocabMap(tuple(ids), SIZE)
    assume(len(ids) > 1)
    first = read_either(list(ids), vocab_size=SIZE, draft_vocab_size=len(ids), t2d=mapping.t2d)
    second = read_either(first.vocab.d2t, vocab_size=SIZE, draft_vocab_size=len(ids), t2d=first.vocab.t2d)
    assert first.vocab == second.vocab == mapping
    assert (first.kind, second.kind) == ("absolute", "offsets")


# -- the file --------------------------------------------------------------------------------------------------------


@pytest.fixture
def vocab_file(tmp_path, draft_policy_dir):
    """Writes a file of the tiny policy; `changes` replace entries of its JSON."""

    def write(chosen=tuple(range(40, 100)), **changes):
        path = tmp_path / "vocab.json"
        fingerprint = tokenizer_fingerprint(Path(draft_policy_dir))
        assert fingerprint is not None
        content = VocabFile(
            VocabMap(tuple(chosen), 320), fingerprint, (chosen[-1],), 1000, 0.97, {64: 0.97, 128: 1.0}, "a test"
        )
        write_vocab_file(path, content)
        assert read_vocab_file(path) == content
        if changes:
            raw = json.loads(path.read_text()) | changes
            path.write_text(json.dumps({key: value for key, value in raw.items() if value != "absent"}))
        return path

    return write


def _resolve(policy_dir, algo="eagle3", **changes):
    return resolve_spec(
        config_for(algo, **changes),
        policy_config=json.loads((Path(policy_dir) / "config.json").read_text()),
        k=K,
        max_model_len=64,
        dtype="float32",
        tokenizer_dir=policy_dir,
    )


def test_a_file_decides_size_and_ids(vocab_file, draft_policy_dir):
    path = vocab_file()
    for size in (None, 60):
        spec = _resolve(draft_policy_dir, vocab_file=str(path), draft_vocab_size=size)
        assert spec.vocab_ids == tuple(range(40, 100))
        assert (spec.architecture.vocab_size, spec.architecture.draft_vocab_size) == (320, 60)
    everything = vocab_file(range(320))
    assert _resolve(draft_policy_dir, vocab_file=str(everything)).vocab_ids is None


def test_only_one_line_holds_the_ids(vocab_file):
    assert len(vocab_file().read_text().splitlines()) == 13


@pytest.mark.parametrize(
    ("file", "draft", "match"),
    [
        ({}, {"draft_vocab_size": 61}, r"draft_vocab_size: got 61; policy\.draft\.vocab_file has 60 ids"),
        ({}, {"model_name": "elsewhere"}, r"vocab_file: got .* beside policy\.draft\.model_name 'elsewhere'"),
        ({"vocab_size": 321}, {}, r"vocab_file: was made for 321 target ids; the policy has 320"),
        ({"tokenizer": "0123"}, {}, r"vocab_file: was made with tokenizer 0123; that of .* is [0-9a-f]{32}"),
        ({"format": "other"}, {}, r"has format 'other'; must be 'nemo_rl_draft_vocab'"),
        ({"version": 2}, {}, r"has version 2; this program reads 1"),
        ({"draft_vocab_size": 59}, {}, r"has draft_vocab_size 59 and 60 ids"),
        ({"ids": [*range(41, 99), 40, 99]}, {}, r"ids that are not ascending"),
        ({"ids": [*range(40, 98), 97, 99]}, {}, r"distinct; 97 occurs more than once"),
        ({"ids": [*range(40, 98), 99, 320]}, {}, r"1 of 60 ids lie outside .*e\.g\. 320\)\. Make the file again"),
        ({"ids": [*range(40, 99), 99.0]}, {}, r"no list of integers under ids"),
        ({"always": [3]}, {}, r"says that ids \[3\] are always kept, and lacks them"),
        ({"tokenizer": "absent"}, {}, r"has tokenizer None"),
        ({"coverage": 1.5}, {}, r"coverage of 1\.5; must be from 0 to 1"),
        ({"coverage_by_size": {"x": 1.0}}, {}, r"no coverage_by_size of integers"),
        ({"vocab_size": True}, {}, r"vocab_size True; must be an integer"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_file_of_something_else_is_refused(vocab_file, draft_policy_dir, file, draft, match):
    path = vocab_file(**file)
    with pytest.raises(ConfigError, match=match):
        _resolve(draft_policy_dir, **{"vocab_file": str(path)} | draft)


def test_a_missing_or_damaged_file_is_refused(vocab_file, draft_policy_dir, tmp_path):
    with pytest.raises(
        ConfigError, match=r"vocab_file: got .*none\.json; there is no such file.*draft_vocab\.py build"
    ):
        _resolve(draft_policy_dir, vocab_file=str(tmp_path / "none.json"))
    path = vocab_file()
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ConfigError, match=r"vocab_file: .*is not valid JSON"):
        _resolve(draft_policy_dir, vocab_file=str(path))


def test_the_placeholder_and_drafts_on_the_policys_head_have_their_own_refusals(vocab_file, draft_policy_dir):
    path = vocab_file([*range(40, 99), MASK_TOKEN])
    with pytest.raises(ConfigError, match=f"got {MASK_TOKEN}, which is one of the ids that the draft proposes"):
        _resolve(draft_policy_dir, "dflash", vocab_file=str(path))
    with pytest.raises(ConfigError, match="eagle1 draft uses the policy's head"):
        _resolve(draft_policy_dir, "eagle1", vocab_file=str(path))
    with pytest.raises(ConfigError, match=r"draft_vocab_size: got 60 of 320 .*tools/draft_vocab\.py build"):
        _resolve(draft_policy_dir, draft_vocab_size=60)


def test_a_fingerprint_is_of_ids_and_texts(tmp_path):
    def fingerprint(name, files):
        directory = tmp_path / name
        directory.mkdir()
        for file, content in files.items():
            (directory / file).write_text(content if isinstance(content, str) else json.dumps(content))
        return tokenizer_fingerprint(directory)

    vocab, added = {"a": 0, "b": 1}, [{"id": 2, "content": "<s>"}]
    first = fingerprint("a", {"tokenizer.json": {"model": {"vocab": vocab, "merges": []}, "added_tokens": added}})
    assert first is not None
    reordered = {"b": 1, "a": 0, "<s>": 2}
    assert fingerprint("b", {"tokenizer.json": {"model": {"vocab": reordered}, "added_tokens": added}}) == first
    assert fingerprint("c", {"vocab.json": vocab, "added_tokens.json": {"<s>": 2}}) == first
    assert (
        fingerprint("d", {"tokenizer.json": {"model": {"vocab": [["a", 0.0], ["b", -1]]}, "added_tokens": added}})
        == first
    )
    assert fingerprint("e", {"vocab.json": {"a": 1, "b": 0}, "added_tokens.json": {"<s>": 2}}) != first
    assert fingerprint("f", {"tokenizer.model": "bytes"}) is not None
    assert fingerprint("g", {}) is None
    with pytest.raises(ConfigError, match="damaged tokenizer"):
        fingerprint("h", {"tokenizer.json": {"model": {"vocab": vocab}, "added_tokens": [3]}})


def test_stop_ids_come_from_both_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5, "text_config": {"eos_token_id": [6, 7]}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert stop_ids(tmp_path) == {5, 6, 7, 8}


# -- from the file to an exported draft ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("algo", ["eagle3", "dspark"])
def test_a_draft_of_a_vocabulary_file_trains_and_exports(vocab_file, one_rank, draft_policy_dir, tmp_path, algo):
    ids = tuple(range(0, 240, 2))
    path = vocab_file(ids)
    whole, reduced = (
        draft_step(draft_policy_dir, shard=False, algo=algo, settings=changes, export_to=str(tmp_path / algo))
        for changes in ({}, {"vocab_file": str(path)})
    )
    (mass, count), (all_mass, all_count) = (result["metrics"]["coverage"] for result in (reduced, whole))
    assert count == all_count > 0
    assert all_mass == pytest.approx(all_count)
    assert 0.1 < mass / count < 0.9
    assert reduced["grads"].keys() == whole["grads"].keys()
    stored = load_file(tmp_path / algo / "model.safetensors")
    assert (stored["d2t"] + torch.arange(len(ids))).tolist() == list(ids)
    assert stored["t2d"].nonzero().flatten().tolist() == list(ids)
    assert stored["lm_head.weight"].shape[0] == len(ids)
    loaded = _resolve(draft_policy_dir, algo, model_name=str(tmp_path / algo))
    assert loaded.vocab_ids == ids
