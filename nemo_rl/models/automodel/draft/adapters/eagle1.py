"""EAGLE-1 drafts in the flat layout of the original authors, which the engine loads unchanged.

EAGLE-2 has no format of its own: it is the same draft under another way of proposing, which the engine does not have.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.adapters.base import DraftAdapter, Serving, SourceConfig
from nemo_rl.models.automodel.draft.adapters.eagle3 import checked_eagle_config
from nemo_rl.models.automodel.draft.adapters.fields import (
    KEY,
    WINDOW_KEYS,
    architecture_name,
    export_algo,
    is_speculators,
    kept_extra,
    positive_integer_at,
    read_geometry,
    refuse_windows,
    written_geometry,
)
from nemo_rl.models.automodel.draft.architecture import DraftArchitecture, Eagle1Architecture
from nemo_rl.models.automodel.draft.config import Eagle1DraftConfig
from nemo_rl.utils.safe_files import shown

__all__ = ["Eagle1Adapter"]

_LOG = logging.getLogger(__name__)
_ARCHITECTURES = ("LlamaForCausalLM", "EagleLlamaForCausalLM")
_FOREIGN = {"LlamaEagleDraftModel": "nemo_automodel", "LlamaForCausalLMEagle1": "verl-SpeCo"}
_KNOWN = frozenset({"bias", "fc_bias", "qkv_bias", "logit_scale", "is_causal", *WINDOW_KEYS})
"""`bias` and `fc_bias` speak of the projection's bias, which its tensor decides about; the engine would take `bias` for
that of the attention, so it is not written back."""


class Eagle1Adapter(DraftAdapter[Eagle1DraftConfig, Eagle1Architecture]):
    """See the module docstring."""

    algo: ClassVar[str] = "eagle1"
    k_rule: ClassVar[str] = "any"
    architecture: ClassVar[type[DraftArchitecture]] = Eagle1Architecture

    def default_feature_ids(self, num_layers: int) -> tuple[int, ...]:
        """None: the draft reads the final state."""
        return ()

    def claims(self, raw: Mapping[str, Any]) -> bool:
        """The layout of the original authors, which says no more than that it is a Llama; EAGLE-3 says more."""
        own = export_algo(raw)
        if own is not None or is_speculators(raw):
            return own == self.algo and not is_speculators(raw)
        name = architecture_name(raw)
        return (
            name in _FOREIGN
            or name == _ARCHITECTURES[1]
            or (
                name == _ARCHITECTURES[0]
                and raw.get("model_type") == "llama"
                and all(raw.get(key) is None for key in ("draft_vocab_size", "eagle_config"))
            )
        )

    def read_config(self, raw: Mapping[str, Any]) -> SourceConfig:
        """Recognise the layout and read its config.json."""
        name = architecture_name(raw)
        if name in _FOREIGN:
            raise ConfigError(
                f"{KEY}: the draft was made by {_FOREIGN[name]}, whose EAGLE-1 norms the first layer's input and the "
                "output; the engine has no such norms and cannot serve it. Use another draft, or null for a new one."
            )
        if name not in _ARCHITECTURES or raw.get("model_type") != "llama" or is_speculators(raw):
            raise ConfigError(
                f"{KEY}: its config.json has architectures {shown(raw.get('architectures'))} and model_type "
                f"{shown(raw.get('model_type'))}{_kind(raw)}; an eagle1 draft has architectures "
                f"{[_ARCHITECTURES[0]]} and model_type llama. The directory holds a draft of another algorithm (its "
                "name goes to policy.draft.algo), or no draft."
            )
        checked_eagle_config(raw)
        refuse_windows(raw, positive_integer_at(raw, "num_hidden_layers") or 0)
        own = export_algo(raw)
        if own not in (None, self.algo):
            raise ConfigError(f"{KEY}: it is a draft of algorithm {shown(own)}. Set policy.draft.algo to that.")
        return SourceConfig(
            publisher="eagle" if own is None else "nemo_rl",
            fields=read_geometry(raw, "llama") | {"extra": kept_extra(raw, _KNOWN)},
            feature_ids=None,
        )

    def check(
        self, cfg: Eagle1DraftConfig, arch: Eagle1Architecture, *, policy: Mapping[str, Any], k: int | None
    ) -> None:
        """The head is the policy's, so the draft has its width and its vocabulary."""
        if arch.hidden_size != arch.target_hidden_size:
            raise ConfigError(
                f"{KEY}: hidden_size is {arch.hidden_size}, target_hidden_size {arch.target_hidden_size}; an eagle1 "
                "draft predicts the policy's state, so they must be equal. Use another draft."
            )
        if arch.has_vocab_map:
            raise ConfigError(
                f"policy.draft.draft_vocab_size: got {arch.draft_vocab_size}; an eagle1 draft uses the policy's head "
                f"and proposes all {arch.vocab_size} ids. Remove the key, or use a draft without a reduced vocabulary."
            )
        if not cfg.hidden_loss_weight and not cfg.token_loss_weight:
            raise ConfigError(
                "policy.draft.hidden_loss_weight: got 0 beside token_loss_weight 0, which leaves nothing to learn. "
                "Raise one, or set policy.draft.static: true to serve a draft without training it."
            )
        if cfg.algo != self.algo:
            _LOG.warning(
                "policy.draft.algo: %s is trained and served as %s; the engine proposes one chain of tokens, not a "
                "tree of them",
                cfg.algo,
                self.algo,
            )

    def max_num_speculative_tokens(self, cfg: Eagle1DraftConfig, arch: Eagle1Architecture) -> int | None:
        """No limit: the draft reads its own output."""
        return cfg.max_num_speculative_tokens

    def write_config(self, arch: Eagle1Architecture, *, dtype: str) -> dict[str, Any]:
        """The native layout."""
        return written_geometry(arch, dtype=dtype, algo=self.algo) | {"architectures": [_ARCHITECTURES[0]]}

    def serving(self, arch: Eagle1Architecture, *, device: str | None) -> Serving:
        """The engine's own method."""
        return Serving("eagle")


def _kind(raw: Mapping[str, Any]) -> str:
    kind = raw.get("speculators_model_type")
    return "" if kind is None else f", speculators_model_type {shown(kind)}"
