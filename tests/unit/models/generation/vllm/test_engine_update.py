"""Weight updates of a running engine: all or nothing, read back, equal to an engine started on the new weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.errors import ConfigError, RefitError
from nemo_rl.models.generation.vllm.vllm_worker import release_beside_another
from nemo_rl.weight_sync.checksum import tensor_checksum
from nemo_rl.weight_sync.interfaces import RefitPayload
from tests.unit.models.generation.vllm import counting_models as counting
from tests.unit.models.generation.vllm.conftest import Served, generation_config, make_worker, prompts

DATA = prompts(8, seed=11)


@pytest.fixture
def engine(served: Served) -> Iterator[Served]:
    """The shared engine; its first weights are put back afterwards."""
    policy, draft = served.policy, served.draft
    yield served
    served.update(policy, draft)


def _model(served: Served, kind: str):
    return served.worker._llm.collective_rpc({"policy": "get_model", "draft": "get_draft_model"}[kind])[0]


def _state(served: Served) -> tuple[list[list[int]], object, dict[str, str]]:
    """Tokens, counters and every parameter of both models."""
    before = served.worker.spec_counters()
    tokens = served.worker.generate(DATA, greedy=True)["output_ids"].tolist()
    parameters = {
        f"{kind}.{name}": tensor_checksum(p)
        for kind in ("policy", "draft")
        for name, p in _model(served, kind).named_parameters()
    }
    return tokens, served.worker.spec_counters() - before, parameters


# --- refused updates ------------------------------------------------------------------------------


def _without(name: str) -> Callable[[counting.Weights, counting.Weights], None]:
    def damage(policy: counting.Weights, draft: counting.Weights) -> None:
        del (draft if name.startswith("draft.") else policy)[name.removeprefix("draft.")]

    return damage


def _with(name: str, make: Callable[[counting.Weights], torch.Tensor]) -> Callable:
    def damage(policy: counting.Weights, draft: counting.Weights) -> None:
        weights = draft if name.startswith("draft.") else policy
        weights[name.removeprefix("draft.")] = make(weights)

    return damage


def _no_draft(policy: counting.Weights, draft: counting.Weights) -> None:
    draft.clear()


def _nan(weights: counting.Weights) -> torch.Tensor:
    bad = weights["fc.weight"].clone()
    bad[3, 3] = float("nan")
    return bad


BAD = {
    "missing draft tensor": (_without("draft.fc.weight"), "1 tensor(s) missing: draft.fc.weight"),
    "missing half of a fused draft projection": (
        _without("draft.layers.0.self_attn.k_proj.weight"),
        "1 tensor(s) missing: draft.layers.0.self_attn.k_proj.weight",
    ),
    "missing policy tensor": (_without("model.norm.weight"), "1 tensor(s) missing: model.norm.weight"),
    "no draft at all": (_no_draft, "13 tensor(s) missing: draft.fc.weight"),
    "extra draft tensor": (
        _with("draft.embed_tokens.weight", lambda w: torch.zeros(320, 64)),
        "1 tensor(s) not known to the engine: draft.embed_tokens.weight",
    ),
    "extra policy tensor": (_with("model.x", lambda w: torch.zeros(1)), "1 tensor(s) not known to the engine: model.x"),
    "wrong shape": (
        _with("draft.fc.weight", lambda w: w["fc.weight"][:, :128]),
        "draft.fc.weight (got [64, 128], announced [64, 128], needs [64, 192])",
    ),
    "transposed square": (
        _with("model.layers.0.self_attn.o_proj.weight", lambda w: torch.zeros(64, 65)),
        "model.layers.0.self_attn.o_proj.weight (got [64, 65]",
    ),
    "wrong dtype": (
        _with("draft.norm.weight", lambda w: w["norm.weight"].to(torch.bfloat16)),
        "draft.norm.weight (got bfloat16, announced bfloat16, needs float32)",
    ),
    "NaN in the draft": (_with("draft.fc.weight", _nan), "1 tensor(s) not finite: draft.fc.weight"),
    "infinity in the policy": (
        _with("model.norm.weight", lambda w: torch.full((64,), float("inf"))),
        "1 tensor(s) not finite: model.norm.weight",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_update_is_refused_and_nothing_changes(engine: Served, case: str) -> None:
    damage, message = BAD[case]
    policy, draft = counting.perturbed(engine.policy, seed=1), counting.perturbed(engine.draft, seed=2)
    damage(policy, draft)
    before = _state(engine)
    with pytest.raises(RefitError) as info:
        engine.worker.update_weights(counting.make_payload(engine.version + 1, policy, draft))
    assert message in str(info.value)
    assert "No weight was changed" in str(info.value)
    assert _state(engine) == before
    assert engine.worker.weight_version == engine.version


def test_a_good_update_works_after_a_refused_one(engine: Served) -> None:
    good = counting.perturbed(engine.policy, seed=1), counting.perturbed(engine.draft, seed=2)
    bad = dict(good[1])
    bad.pop("fc.weight")
    with pytest.raises(RefitError):
        engine.worker.update_weights(counting.make_payload(engine.version + 1, good[0], bad))
    report = engine.update(*good)
    assert report.num_checked == len(good[0]) + len(good[1])


def test_bytes_altered_on_the_way_are_refused(engine: Served) -> None:
    payload = counting.make_payload(engine.version + 1, engine.policy, engine.draft)
    payload.tensors["draft.fc.weight"] = payload.tensors["draft.fc.weight"] + 1
    with pytest.raises(RefitError, match=r"altered on the way \(checksum\): draft\.fc\.weight"):
        engine.worker.update_weights(payload)


@pytest.mark.parametrize("behind", [0, 1], ids=["same", "older"])
def test_a_version_that_is_not_newer_is_refused(engine: Served, behind: int) -> None:
    engine.update(engine.policy, engine.draft)
    payload = counting.make_payload(engine.version - behind, engine.policy, engine.draft)
    with pytest.raises(RefitError, match=f"holds version {engine.version} and only takes newer"):
        engine.worker.update_weights(payload)


def test_an_aliased_head_is_caught_before_it_overwrites_the_policy(engine: Served) -> None:
    policy, draft = _model(engine, "policy"), _model(engine, "draft")
    own, before = draft.lm_head, tensor_checksum(policy.lm_head.weight)
    draft.lm_head = policy.lm_head
    try:
        with pytest.raises(RefitError, match=r"share memory .* lm_head\.weight = lm_head\.weight"):
            engine.worker.update_weights(
                counting.make_payload(engine.version + 1, engine.policy, counting.perturbed(engine.draft, seed=5))
            )
    finally:
        draft.lm_head = own
    assert tensor_checksum(policy.lm_head.weight) == before
    engine.update(engine.policy, engine.draft)


def test_one_array_under_two_names_is_told_apart(engine: Served) -> None:
    """Exchanged tensors of equal shape: only the checksums can tell."""
    payload = counting.make_payload(engine.version + 1, engine.policy, engine.draft)
    arrays = dict(payload.tensors)
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)]
    arrays[names[0]], arrays[names[1]] = arrays[names[1]], arrays[names[0]]
    with pytest.raises(RefitError, match="2 tensor"):
        engine.worker.update_weights(dataclasses.replace(payload, tensors=arrays))


# --- applied updates ------------------------------------------------------------------------------


def test_what_is_trained_is_owned_and_what_is_not_is_shared(served: Served) -> None:
    """The draft's file held the policy's head, which makes vLLM share it; and it held no embedding."""
    policy, draft = _model(served, "policy"), _model(served, "draft")
    assert draft.lm_head is not policy.lm_head
    assert draft.lm_head.weight.untyped_storage().data_ptr() != policy.lm_head.weight.untyped_storage().data_ptr()
    assert draft.model.embed_tokens is policy.model.embed_tokens


def test_an_update_of_the_draft_leaves_every_policy_parameter_bit_identical(engine: Served) -> None:
    policy = _model(engine, "policy")
    before = {name: (p.data_ptr(), p.clone()) for name, p in policy.named_parameters()}
    tokens = engine.worker.generate(DATA, greedy=True)["output_ids"]
    old_draft = {name: tensor_checksum(p) for name, p in _model(engine, "draft").named_parameters()}
    engine.update(engine.policy, counting.perturbed(engine.draft, seed=3, scale=0.1))
    for name, p in policy.named_parameters():
        assert p.data_ptr() == before[name][0], name
        assert torch.equal(p, before[name][1]), name
    assert torch.equal(engine.worker.generate(DATA, greedy=True)["output_ids"], tokens)
    new_draft = {name: tensor_checksum(p) for name, p in _model(engine, "draft").named_parameters()}
    assert {name for name in new_draft if new_draft[name] == old_draft[name]} == {"model.embed_tokens.weight"}


def test_the_draft_alone_can_be_updated(engine: Served) -> None:
    """Same tokens, same policy tensors, the new draft; what else an update does is done, too."""
    policy = _model(engine, "policy")
    before = {name: (p.data_ptr(), p.clone()) for name, p in policy.named_parameters()}
    right = _state(engine)
    broken = {**engine.draft, "lm_head.weight": -engine.draft["lm_head.weight"]}
    report = engine.worker.update_weights(counting.make_payload(engine.version + 1, {}, broken, draft_only=True))
    engine.version = report.version
    assert report.num_checked == len(broken)
    for name, p in policy.named_parameters():
        assert p.data_ptr() == before[name][0], name
        assert torch.equal(p, before[name][1]), name
    wrong = _state(engine)
    assert wrong[0] == right[0]
    assert wrong[1].num_accepted_tokens < 0.2 * right[1].num_accepted_tokens


ALONE = {
    "not said to be alone": (False, lambda draft: draft, "missing: lm_head.weight, model.embed_tokens"),
    "a missing tensor": (True, lambda draft: {**draft, "fc.weight": None}, "1 tensor(s) missing: draft.fc.weight"),
}


@pytest.mark.parametrize("case", ALONE)
def test_an_incomplete_draft_alone_is_refused(engine: Served, case: str) -> None:
    draft_only, change, message = ALONE[case]
    draft = {name: tensor for name, tensor in change(dict(engine.draft)).items() if tensor is not None}
    before = _state(engine)
    with pytest.raises(RefitError) as info:
        engine.worker.update_weights(counting.make_payload(engine.version + 1, {}, draft, draft_only=draft_only))
    assert message in str(info.value)
    assert _state(engine) == before


def test_a_changed_tensor_changes_what_the_draft_proposes(engine: Served) -> None:
    """Acceptance moves with the draft, tokens do not."""
    right = _state(engine)
    broken = {**engine.draft, "lm_head.weight": -engine.draft["lm_head.weight"]}
    engine.update(engine.policy, broken)
    wrong = _state(engine)
    assert wrong[0] == right[0]
    assert wrong[1].num_accepted_tokens < 0.2 * right[1].num_accepted_tokens


def test_the_version_is_stamped_on_every_output(engine: Served) -> None:
    for _ in range(2):
        engine.update(engine.policy, engine.draft)
        assert engine.worker.generate(DATA)["weight_versions"].tolist() == [engine.version] * DATA.size


def test_every_tensor_is_read_back(engine: Served) -> None:
    report = engine.update(engine.policy, engine.draft)
    assert report.num_checked == len(engine.policy) + len(engine.draft)
    assert report.unchecked == ()


def test_the_prefix_cache_is_dropped(engine: Served) -> None:
    row = BatchedDataDict({"input_ids": torch.arange(80)[None] + 20, "input_lengths": torch.tensor([80])})

    def cached_tokens() -> int:
        return engine.worker._run(engine.worker._llm, row, greedy=True)[0].num_cached_tokens

    cached_tokens()
    assert cached_tokens() >= 32  # the cache works, else this test shows nothing
    engine.update(engine.policy, engine.draft)
    assert cached_tokens() == 0


def test_a_shared_embedding_follows_the_policy(engine: Served) -> None:
    policy = counting.perturbed(engine.policy, seed=4)
    engine.update(policy, engine.draft)
    draft = _model(engine, "draft")
    assert torch.equal(draft.model.embed_tokens.weight[:320], policy["model.embed_tokens.weight"])


# --- a second engine ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def new_weights(served: Served, tmp_path_factory: pytest.TempPathFactory):
    """Weights after some training, in directories of their own."""
    root = tmp_path_factory.mktemp("trained")
    policy_dir, draft_dir = root / "policy", root / "draft"
    counting.write_counting_policy(policy_dir)
    counting.write_counting_draft(draft_dir, policy_dir)
    policy, draft = counting.perturbed(served.policy, seed=21), counting.perturbed(served.draft, seed=22)
    counting.save(policy_dir, policy)
    counting.save(draft_dir, draft)
    return policy_dir, draft_dir, policy, draft


@pytest.fixture(scope="module")
def fresh(served: Served, new_weights) -> Iterator[Served]:
    """An engine that was started on the new weights and never updated."""
    policy_dir, draft_dir, policy, draft = new_weights
    worker = make_worker(policy_dir, generation_config(vllm_kwargs={"block_size": 32}))
    worker.build(speculative_config=counting.speculative_config(draft_dir), trained_draft_tensors=tuple(draft))
    yield Served(worker, policy_dir, draft_dir, policy, draft)
    release_beside_another(worker._llm)


def test_an_updated_engine_equals_one_started_on_the_new_weights(engine: Served, fresh: Served, new_weights) -> None:
    _, _, policy, draft = new_weights
    before = _state(engine)
    engine.update(policy, draft)
    updated, started = _state(engine), _state(fresh)
    assert updated == started
    assert updated != before
    a, b = engine.worker.generate(DATA), fresh.worker.generate(DATA)
    assert torch.equal(a["output_ids"], b["output_ids"])
    assert torch.equal(a["logprobs"], b["logprobs"])


def test_a_tensor_that_the_loader_drops_is_found_and_the_engine_is_retired(
    fresh: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs last: it ruins the second engine. vLLM accepts a partial load without a word."""
    policy = _model(fresh, "policy")
    load = type(policy).load_weights

    def forgetful(self, weights):
        return load(self, ((name, t) for name, t in weights if name != "model.layers.1.mlp.down_proj.weight"))

    monkeypatch.setattr(type(policy), "load_weights", forgetful)
    payload = counting.make_payload(0, counting.perturbed(fresh.policy, seed=8), fresh.draft)
    with pytest.raises(
        RefitError, match=r"other values than were sent in 1 tensor\(s\): model\.layers\.1\.mlp\.down_proj"
    ):
        fresh.worker.update_weights(payload)
    for use in (
        lambda: fresh.worker.generate(DATA),
        lambda: fresh.worker.update_weights(payload),
        lambda: fresh.worker.sampling_self_check(),
    ):
        with pytest.raises(RefitError, match="must not be used any more: weight update 0 failed"):
            use()


# --- start-up -------------------------------------------------------------------------------------


def test_a_directory_that_lacks_a_trained_tensor_is_refused_at_start(served: Served, tmp_path) -> None:
    worker = make_worker(served.policy_dir, generation_config())
    draft = counting.write_counting_draft(tmp_path / "draft", served.policy_dir)
    with pytest.raises(ConfigError, match=r"lacks tensors that training updates: \['fc_norm.weight'\]"):
        worker.build(
            speculative_config=counting.speculative_config(tmp_path / "draft"),
            trained_draft_tensors=(*draft, "fc_norm.weight"),
        )


def test_training_a_draft_that_the_engine_does_not_run_is_refused_at_start(served: Served) -> None:
    worker = make_worker(served.policy_dir, generation_config())
    with pytest.raises(ConfigError, match="training sends 1 draft tensors, but the engine runs no draft model"):
        worker.build(trained_draft_tensors=("fc.weight",))


def test_a_draft_parameter_that_no_file_holds_is_refused_at_start(served: Served, tmp_path) -> None:
    """vLLM would load the directory without a word and serve uninitialised memory."""
    worker = make_worker(served.policy_dir, generation_config())
    draft = counting.write_counting_draft(tmp_path / "draft", served.policy_dir)
    del draft["fc.weight"]
    counting.save(tmp_path / "draft", draft)
    with pytest.raises(ConfigError, match=r"no update would reach: \['model.fc.weight'\]"):
        worker.build(
            speculative_config=counting.speculative_config(tmp_path / "draft"), trained_draft_tensors=tuple(draft)
        )


def test_a_tensor_that_is_neither_trained_nor_shared_is_refused_at_start(served: Served, tmp_path) -> None:
    worker = make_worker(served.policy_dir, generation_config())
    draft = counting.write_counting_draft(tmp_path / "draft", served.policy_dir)
    with pytest.raises(ConfigError, match=r"neither trained, frozen nor shared with the policy: \['norm.weight'\]"):
        worker.build(
            speculative_config=counting.speculative_config(tmp_path / "draft"),
            trained_draft_tensors=tuple(name for name in draft if name != "norm.weight"),
        )


def test_a_tied_policy_is_updated_through_its_embedding(served: Served, tmp_path) -> None:
    """On CPU a stock engine would go on computing with the old packed head."""
    from transformers import AutoModelForCausalLM

    policy = counting.write_counting_policy(tmp_path / "policy", tie=True)
    worker = make_worker(tmp_path / "policy", generation_config())
    worker.build()
    new = counting.perturbed(policy, seed=31, scale=0.3)
    payload: RefitPayload = counting.make_payload(0, new, {})
    report = worker.update_weights(payload)
    assert report.num_checked == len(new)
    with_head = {**new, "lm_head.weight": new["model.embed_tokens.weight"].clone()}
    assert worker.update_weights(counting.make_payload(1, with_head, {})).num_checked == len(new) + 1
    with_head["lm_head.weight"][0] += 1
    with pytest.raises(RefitError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        worker.update_weights(counting.make_payload(2, with_head, {}))
    out = worker.generate(DATA, greedy=True)
    counting.save(tmp_path / "policy", new)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32).eval()
    for row in range(DATA.size):
        start, end = int(DATA["input_lengths"][row]), int(out["unpadded_sequence_lengths"][row])
        with torch.no_grad():
            logits = model(out["output_ids"][row : row + 1, :end]).logits[0, start - 1 : end - 1]
        assert logits.argmax(-1).tolist() == out["output_ids"][row, start:end].tolist()
    release_beside_another(worker._llm)


def test_draft_tensors_without_a_draft_are_refused(served: Served) -> None:
    worker = make_worker(served.policy_dir, generation_config())
    worker.build()
    with pytest.raises(RefitError, match="carries 13 draft tensors, but the engine has no draft"):
        worker.update_weights(counting.make_payload(0, served.policy, served.draft))
    assert worker.generate(DATA)["weight_versions"].tolist() == [-1] * DATA.size
    release_beside_another(worker._llm)
