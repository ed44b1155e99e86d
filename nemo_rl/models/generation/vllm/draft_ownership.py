"""Which tensors the draft in the engine owns, and which are the target's.

vLLM decides at load: the draft gets the target's module when its file has no such tensor *or an equal one*. A head that
training starts from the policy's is equal at first, so an update of it would overwrite the policy's head. Here the
publish contract decides instead: what is trained or frozen is the draft's own, every other embedding or head of the
target's size is the live target's, whatever the file held.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from nemo_rl.errors import RefitError
from nemo_rl.models.generation.vllm.readback import ModelTensors

logger = logging.getLogger(__name__)

_SHAREABLE = (("model", "embed_tokens", VocabParallelEmbedding), ("", "lm_head", ParallelLMHead))
"""(path of the owner, attribute, class) of the modules that vLLM may share; export names are `<attribute>.weight`."""


def settle_ownership(target: nn.Module, draft: nn.Module, *, owned: Collection[str]) -> None:
    """Give the draft its own module for each tensor that it owns, and the target's for each other one of equal shape.

    Call right after loading, before anything is compiled or captured, inside the device and config contexts in which
    vLLM builds modules.

    Args:
        target: The loaded policy.
        draft: The loaded draft, which may hold modules of the target.
        owned: Export names of the tensors that training sends or keeps as they are.

    Raises:
        RefitError: Draft and target still share memory that the draft owns.
    """
    target = language_model(target)
    for path, attribute, cls in _SHAREABLE:
        draft_owner, target_owner = _owner(draft, path), _owner(target, path)
        if not hasattr(draft_owner, attribute) or not hasattr(target_owner, attribute):
            continue
        mine, theirs = getattr(draft_owner, attribute), getattr(target_owner, attribute)
        if f"{attribute}.weight" in owned:
            if mine.weight.untyped_storage().data_ptr() == theirs.weight.untyped_storage().data_ptr():
                setattr(draft_owner, attribute, _own_copy(theirs, cls))
                logger.info("The draft owns %s.weight; it was given its own copy.", attribute)
        elif mine is not theirs and mine.weight.shape == theirs.weight.shape:
            setattr(draft_owner, attribute, theirs)
            logger.info("The draft does not own %s.weight; it uses the policy's.", attribute)
    check_no_alias(target, draft, owned=owned)


def check_no_alias(target: nn.Module, draft: nn.Module, *, owned: Collection[str]) -> None:
    """Check storage addresses: no tensor that the draft owns lies in the target's memory.

    Raises:
        RefitError: With the names that share memory.
    """
    draft_tensors = ModelTensors(draft)
    inside = {draft_tensors.parameter_name(name): name for name in owned}
    target_storages = ModelTensors(target).storages()
    shared = draft_tensors.storages(name for name in inside if name in draft_tensors.floating_names())
    aliased = sorted(f"{inside[name]} = {target_storages[at]}" for at, name in shared.items() if at in target_storages)
    if aliased:
        raise RefitError(
            f"Draft and policy share memory for tensors that the draft owns: {', '.join(aliased)}. An update of the "
            "draft would change the policy. No weight was changed."
        )


def shared_modules(target: nn.Module, draft: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """(owner in the draft, attribute, module) of the modules of the draft that are the target's."""
    target = language_model(target)
    found: list[tuple[nn.Module, str, nn.Module]] = []
    for path, attribute, _ in _SHAREABLE:
        draft_owner, target_owner = _owner(draft, path), _owner(target, path)
        mine: nn.Module | None = getattr(draft_owner, attribute, None)
        if mine is not None and mine is getattr(target_owner, attribute, None):
            found.append((draft_owner, attribute, mine))
    return found


def language_model(model: Any) -> nn.Module:
    """The text part of a multimodal model, else the model."""
    return model.get_language_model() if hasattr(model, "get_language_model") else model


def _owner(model: nn.Module, path: str) -> nn.Module:
    return getattr(model, path) if path else model


def _own_copy(shared: Any, cls: type[VocabParallelEmbedding]) -> nn.Module:
    copy: Any = cls(
        shared.num_embeddings,
        shared.embedding_dim,
        params_dtype=shared.weight.dtype,
        org_num_embeddings=shared.org_vocab_size,
    )
    record_metadata_for_reloading(copy)
    copy.weight.data.copy_(shared.weight.data)
    copy.quant_method.process_weights_after_loading(copy)
    return copy
