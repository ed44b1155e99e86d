"""The torch-free half of a draft algorithm: what its draft looks like, in configuration, in files and in the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.architecture import DraftArchitecture
from nemo_rl.models.automodel.draft.config import DraftConfigBase

__all__ = ["K_KEY", "LAYOUTS", "DraftAdapter", "Serving", "SourceConfig", "Verifier"]

K_KEY = "policy.generation.vllm_kwargs.speculative_config.num_speculative_tokens"

LAYOUTS = ("native", "speculators")
"""Layouts of an export: what the engine's authors write, and that of vLLM's speculators library."""

ConfigT = TypeVar("ConfigT", bound=DraftConfigBase)
ArchT = TypeVar("ArchT", bound=DraftArchitecture)


@dataclass(frozen=True)
class SourceConfig:
    """What a checkpoint's config.json says, before the user's settings are merged in.

    Attributes:
        publisher: who wrote it, as far as that can be told: `nemo_rl` (our own export), `speculators`, `automodel`,
            `modelopt`, `specforge`, `angelslim`, `speco`, `zlab`, `deepseek`, `eagle` (the original authors); `native`
            for the flat layout that several share.
        fields: arguments of the algorithm's architecture other than `feature_ids`.
        feature_ids: canonical ids, or None when the file does not say.
        num_features: features that the file counts, or None.
        is_norm_output_ambiguous: the file turns `norm_output` on and publishers differ about its meaning.
        unclear_ids: key under which the file names policy layers, where nothing says how that publisher counts them.
    """

    publisher: str
    fields: Mapping[str, Any]
    feature_ids: tuple[int, ...] | None
    num_features: int | None = None
    is_norm_output_ambiguous: bool = False
    unclear_ids: str | None = None


class Verifier(NamedTuple):
    """The policy as the speculators layout names it.

    Attributes:
        name_or_path: of its checkpoint.
        architectures: of its config.json.
    """

    name_or_path: str
    architectures: tuple[str, ...]


@dataclass(frozen=True)
class Serving:
    """How an engine runs the draft.

    Attributes:
        method: `speculative_config.method`.
        options: further entries of `speculative_config`.
        extension: `module:function` that the engine process calls first, where the engine has no path of its own.
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    extension: str | None = None


class DraftAdapter(ABC, Generic[ConfigT, ArchT]):
    """What an algorithm's draft is: one stateless object per algorithm, read by driver, workers and engine."""

    algo: ClassVar[str]
    """Name of the algorithm."""

    architecture: ClassVar[type[DraftArchitecture]]
    """Class of its drafts' shapes."""

    default_num_layers: ClassVar[int] = 1
    """Decoder layers of a new draft whose configuration names no number."""

    k_rule: ClassVar[str]
    """Which K the draft proposes, in a few words for a table."""

    switches: ClassVar[Mapping[str, Any]] = {}
    """Fields of configuration and architecture alike, with the value of a new draft where the configuration has null.
    A loaded draft keeps its file's values; a configuration that names another is refused."""

    layer_family: ClassVar[Literal["llama", "qwen3"]] = "llama"
    """Family of a new draft's layers."""

    depth_key: ClassVar[str] = ""
    """Field of the configuration that bounds K."""

    @abstractmethod
    def default_feature_ids(self, num_layers: int) -> tuple[int, ...]:
        """Canonical feature ids of a new draft whose configuration names none.

        Args:
            num_layers: decoder layers of the policy.

        Raises:
            ConfigError: the policy has too few layers for the default.
        """

    def new_fields(self, cfg: ConfigT, *, policy: Mapping[str, Any], k: int | None) -> dict[str, Any]:
        """Arguments of the architecture of a new draft beyond geometry, features and switches.

        Args:
            cfg: `policy.draft`.
            policy: config.json of the policy (of its text part).
            k: tokens proposed per step; None = the draft is not served.
        """
        return {}

    layouts: ClassVar[tuple[str, ...]] = ("native",)
    """Those of `LAYOUTS` that this algorithm has; the first is the one that checkpoints hold."""

    def claims(self, raw: Mapping[str, Any]) -> bool:
        """Whether a config.json says that it describes a draft of this algorithm; whether it can be used is not asked.

        Args:
            raw: the parsed file.
        """
        raise NotImplementedError

    @abstractmethod
    def read_config(self, raw: Mapping[str, Any]) -> SourceConfig:
        """Recognise the publisher of a draft and read its config.json.

        Args:
            raw: the parsed file.

        Raises:
            ConfigError: another algorithm's draft, or one that this program or the engine cannot run.
        """

    def check_source(self, cfg: ConfigT, source: SourceConfig) -> None:
        """Refuse what the file leaves open and the configuration does not settle."""

    def loaded_fields(self, cfg: ConfigT, source: SourceConfig) -> dict[str, Any]:
        """Arguments of the architecture of a loaded draft but its features: the file's, or what `cfg` may change.

        Args:
            cfg: `policy.draft`.
            source: what the file says; `check_source` accepted it.
        """
        return dict(source.fields)

    @abstractmethod
    def check(self, cfg: ConfigT, arch: ArchT, *, policy: Mapping[str, Any], k: int | None) -> None:
        """Refuse what contradicts itself or cannot be served: K, placeholder token, head types.

        Args:
            cfg: `policy.draft`.
            arch: what was decided.
            policy: config.json of the policy (of its text part).
            k: tokens proposed per step; None = the draft is not served.
        """

    @abstractmethod
    def max_num_speculative_tokens(self, cfg: ConfigT, arch: ArchT) -> int | None:
        """Largest K that the draft is trained to propose; None = no limit."""

    def computed_positions(self, cfg: ConfigT, arch: ArchT, *, tokens: int, samples: int) -> int:
        """Positions that the draft computes in training for one micro-batch, for an estimate of memory.

        Args:
            cfg: `policy.draft`.
            arch: what was decided.
            tokens: of the micro-batch.
            samples: of the micro-batch.

        Returns:
            Every token at every depth, unless the algorithm says otherwise.
        """
        return tokens * (cfg.max_num_speculative_tokens or 1)

    @abstractmethod
    def write_config(self, arch: ArchT, *, dtype: str) -> dict[str, Any]:
        """The config.json of an export: every field explicit, no reader's default relied upon.

        Args:
            arch: the draft.
            dtype: of the weights beside it.
        """

    def write_speculators(self, arch: ArchT, *, dtype: str, k: int, verifier: Verifier) -> dict[str, Any]:
        """The config.json of an export in the speculators layout.

        Args:
            arch: the draft.
            dtype: of the weights beside it.
            k: tokens proposed per step.
            verifier: the policy.

        Raises:
            ConfigError: the layout has no such draft.
        """
        raise ConfigError(
            f"policy.draft.export_layouts: got speculators; a draft of algorithm {self.algo} exists in "
            f"{list(self.layouts)} only. Remove it."
        )

    @abstractmethod
    def serving(self, arch: ArchT, *, device: str | None) -> Serving:
        """How the engine runs the draft.

        Args:
            arch: the draft.
            device: `cpu` or `cuda`; None = not known yet, treated as `cuda`.
        """
