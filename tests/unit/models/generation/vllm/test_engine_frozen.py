"""Draft tensors that no update carries: they are the draft's own and stay as they were loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl.errors import RefitError
from nemo_rl.models.generation.vllm.vllm_worker import release_beside_another
from tests.unit.models.generation.vllm import counting_models as counting
from tests.unit.models.generation.vllm.conftest import Served, generation_config, make_worker

pytestmark = pytest.mark.vllm

FROZEN = ("lm_head.weight", "norm.weight", "layers.0.mlp.down_proj.weight")


def start(policy_dir: Path, draft_dir: Path, *, frozen: tuple[str, ...]) -> Served:
    """An engine whose draft's head equals the policy's at first: vLLM would share the two."""
    draft = load_file(str(draft_dir / "model.safetensors"))
    policy = load_file(str(policy_dir / "model.safetensors"))
    assert torch.equal(draft["lm_head.weight"], policy["lm_head.weight"])
    worker = make_worker(policy_dir, generation_config(vllm_kwargs={"block_size": 32}))
    worker.build(
        speculative_config=counting.speculative_config(draft_dir),
        trained_draft_tensors=tuple(name for name in draft if name not in frozen),
        frozen_draft_tensors=frozen,
    )
    return Served(worker, policy_dir, draft_dir, policy, draft)


@pytest.fixture(scope="module")
def partly(model_dirs: tuple[Path, Path]) -> Iterator[Served]:
    served = start(*model_dirs, frozen=FROZEN)
    yield served
    release_beside_another(served.worker._llm)


def held(served: Served, kind: str) -> dict[str, torch.Tensor]:
    model = served.worker._llm.collective_rpc(kind)[0]
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_frozen_tensors_stay_and_the_others_are_updated(partly: Served) -> None:
    first = partly.draft
    draft = counting.perturbed({name: t for name, t in first.items() if name not in FROZEN}, seed=3)
    policy = counting.perturbed(partly.policy, seed=4)
    report = partly.update(policy, draft)
    assert report.num_checked == len(policy) + len(draft)
    assert report.unchecked == ()
    engine = held(partly, "get_draft_model")
    assert torch.equal(engine["lm_head.weight"], first["lm_head.weight"])
    assert torch.equal(engine["model.norm.weight"], first["norm.weight"])
    assert torch.equal(engine["model.fc.weight"], draft["fc.weight"])
    # The policy's head has moved; the frozen one was equal to it when it was loaded, and is another tensor.
    assert torch.equal(held(partly, "get_model")["lm_head.weight"], policy["lm_head.weight"])
    assert not torch.equal(policy["lm_head.weight"], first["lm_head.weight"])


def test_an_update_that_carries_a_frozen_tensor_is_refused(partly: Served) -> None:
    trained = {name: t for name, t in partly.draft.items() if name not in FROZEN}
    payload = counting.make_payload(partly.version + 1, partly.policy, trained | {"norm.weight": torch.ones(64)})
    with pytest.raises(RefitError, match=r"1 tensor\(s\) not known to the engine: draft\.norm\.weight"):
        partly.worker.update_weights(payload)


def test_a_static_draft_does_not_change_with_the_policy(model_dirs: tuple[Path, Path]) -> None:
    served = start(*model_dirs, frozen=tuple(load_file(str(model_dirs[1] / "model.safetensors"))))
    try:
        before = held(served, "get_draft_model")
        policy = counting.perturbed(served.policy, seed=5)
        assert served.update(policy, {}).num_checked == len(policy)
        after = held(served, "get_draft_model")
        shared = {"model.embed_tokens.weight"}
        assert {name for name in before if not torch.equal(before[name], after[name])} == shared
        assert torch.equal(after["model.embed_tokens.weight"], policy["model.embed_tokens.weight"])
        with pytest.raises(RefitError, match="no draft that training updates"):
            served.update(policy, {"norm.weight": torch.ones(64)})
    finally:
        release_beside_another(served.worker._llm)
