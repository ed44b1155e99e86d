"""Draft algorithm -> configuration, adapter and runtime: the only dispatch in the program.

To add an algorithm: its config class, its adapter, its module, its runtime file, one line of the table. Modules are
named as text because the driver reads this table without torch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.models.automodel.draft.adapters.base import DraftAdapter, Verifier
from nemo_rl.models.automodel.draft.adapters.fields import verifier_name
from nemo_rl.models.automodel.draft.config import (
    DFlashDraftConfig,
    DominoDraftConfig,
    DraftConfig,
    DraftConfigBase,
    DSparkDraftConfig,
    Eagle1DraftConfig,
    Eagle3DraftConfig,
    PEagleDraftConfig,
)
from nemo_rl.models.automodel.draft.metadata import verify_files
from nemo_rl.models.automodel.draft.spec import DraftSpec, check_placeholder, resolve_draft_spec, text_config
from nemo_rl.models.automodel.draft.vocab_file import chosen_vocab
from nemo_rl.models.automodel.draft.weight_files import find_weight_files, member
from nemo_rl.utils.safe_files import read_json_object, shown

if TYPE_CHECKING:
    import torch
    from torch import nn

    from nemo_rl.models.automodel.draft.runtime import _DraftRuntimeBase

__all__ = [
    "ALIASES",
    "DRAFT_ALGORITHMS",
    "DraftAlgorithm",
    "adapter_of",
    "algorithm_of",
    "build_draft_runtime",
    "known_tokens",
    "resolve_spec",
]


@dataclass(frozen=True)
class DraftAlgorithm:
    """One line of the table.

    Attributes:
        config: the schema class of `policy.draft`.
        adapter: `module:class`, a `DraftAdapter`; torch-free.
        runtime: `module:class`, a `_DraftRuntimeBase`.
    """

    config: type[DraftConfigBase]
    adapter: str
    runtime: str


_LOG = logging.getLogger(__name__)

MASK_EMBEDDING_FILE = "mask_embedding.pt"
"""Beside a draft's weights, a pickled embedding that the engine would use instead of the policy's row."""

_MAX_TOKENIZER_BYTES = 256 << 20
_PACKAGE = "nemo_rl.models.automodel.draft"

DRAFT_ALGORITHMS: Mapping[str, DraftAlgorithm] = MappingProxyType(
    {
        "eagle1": DraftAlgorithm(
            Eagle1DraftConfig, f"{_PACKAGE}.adapters.eagle1:Eagle1Adapter", f"{_PACKAGE}.eagle1:Eagle1Runtime"
        ),
        "eagle3": DraftAlgorithm(
            Eagle3DraftConfig, f"{_PACKAGE}.adapters.eagle3:Eagle3Adapter", f"{_PACKAGE}.eagle3:Eagle3Runtime"
        ),
        "peagle": DraftAlgorithm(
            PEagleDraftConfig, f"{_PACKAGE}.adapters.peagle:PEagleAdapter", f"{_PACKAGE}.peagle:PEagleRuntime"
        ),
        "dflash": DraftAlgorithm(
            DFlashDraftConfig, f"{_PACKAGE}.adapters.dflash:DFlashAdapter", f"{_PACKAGE}.dflash:DFlashRuntime"
        ),
        "dspark": DraftAlgorithm(
            DSparkDraftConfig, f"{_PACKAGE}.adapters.dspark:DSparkAdapter", f"{_PACKAGE}.dspark:DSparkRuntime"
        ),
        "domino": DraftAlgorithm(
            DominoDraftConfig, f"{_PACKAGE}.adapters.domino:DominoAdapter", f"{_PACKAGE}.domino:DominoRuntime"
        ),
    }
)

ALIASES: Mapping[str, str] = MappingProxyType({"eagle2": "eagle1"})
"""Names of algorithms that differ from another only in how an engine proposes: trained and served as that one."""


def _entry(algo: str) -> DraftAlgorithm:
    algo = ALIASES.get(algo, algo)
    if algo not in DRAFT_ALGORITHMS:
        raise ConfigError(f"policy.draft.algo: got {algo!r}; must be one of {sorted(DRAFT_ALGORITHMS)}.")
    return DRAFT_ALGORITHMS[algo]


def _load(path: str) -> Any:
    module, name = path.split(":")
    return getattr(import_module(module), name)


def adapter_of(algo: str) -> DraftAdapter[Any, Any]:
    """The torch-free half of an algorithm.

    Args:
        algo: name of the algorithm.
    """
    return _load(_entry(algo).adapter)()


def algorithm_of(raw: Mapping[str, Any]) -> str:
    """The algorithm whose draft a config.json describes.

    Args:
        raw: the parsed file.

    Raises:
        ConfigError: none or several recognise it.
    """
    found = [algo for algo in DRAFT_ALGORITHMS if adapter_of(algo).claims(raw)]
    if len(found) != 1:
        what = f"could be a draft of {found}" if found else "is the draft of no known algorithm"
        raise ConfigError(
            f"policy.draft.algo: cannot be told from the config.json, which {what} (architectures "
            f"{shown(raw.get('architectures'))}, speculators_model_type {shown(raw.get('speculators_model_type'))}). "
            f"Must be one of {sorted(DRAFT_ALGORITHMS)}; name it."
        )
    return found[0]


def resolve_spec(
    cfg: DraftConfig,
    *,
    policy_config: Mapping[str, Any],
    k: int | None,
    max_model_len: int,
    dtype: str,
    device: str | None = None,
    vocab_ids: Sequence[int] | None = None,
    tokenizer_dir: str | Path | None = None,
    needs_weights: bool = True,
    policy_name: str | None = None,
) -> DraftSpec:
    """Read the draft directory, if there is one, and resolve the draft of a run. Needs no torch.

    Args:
        cfg: `policy.draft`.
        policy_config: config.json of the policy.
        k: tokens proposed per step; None is allowed for a draft that is not served.
        max_model_len: longest sequence of the engine.
        dtype: of the engine.
        device: `cpu` or `cuda`, when known.
        vocab_ids: target id of each draft id, for a draft from scratch that proposes only some ids;
            `policy.draft.vocab_file` takes its place.
        tokenizer_dir: of the policy's tokenizer, to check that a placeholder token is not in use and that
            `policy.draft.vocab_file` speaks of the same tokens.
        needs_weights: False resolves a draft directory by its config.json alone.
        policy_name: `policy.model_name`; a draft that names another policy is warned about, for sizes that agree say
            little.

    Raises:
        ConfigError: the draft cannot be used with this policy or engine, or its files are damaged.
    """
    if cfg.vocab_file is not None:
        vocab = chosen_vocab(
            cfg,
            vocab_size=int(text_config(policy_config)["vocab_size"]),
            tokenizer_dir=None if tokenizer_dir is None else Path(tokenizer_dir),
        )
        cfg = cfg.model_copy(update={"draft_vocab_size": len(vocab.ids)})
        vocab_ids = vocab.ids
    draft_config = files = None
    if cfg.model_name is not None:
        directory = Path(cfg.model_name)
        if not directory.is_dir():
            raise ConfigError(
                f"policy.draft.model_name: got {cfg.model_name}; there is no such directory. Give a directory with "
                "config.json and weights, or null to build a draft from the policy."
            )
        try:
            if (directory / MASK_EMBEDDING_FILE).exists():
                raise CheckpointError(
                    f"{directory / MASK_EMBEDDING_FILE}: replaces the placeholder's embedding in the engine, which "
                    "training would not know of. Remove the file, or use another draft."
                )
            draft_config = read_json_object(member(directory, "config.json"))
            _warn_about_policy(draft_config, policy_name)
            files = find_weight_files(directory) if needs_weights else None
        except CheckpointError as err:
            raise ConfigError(f"policy.draft.model_name: {err}") from err
    spec = resolve_draft_spec(
        adapter_of(cfg.algo),
        cfg,
        policy_config=policy_config,
        draft_config=draft_config,
        k=k,
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
        weight_files=files,
        vocab_ids=vocab_ids,
    )
    _check_layouts(cfg, spec)
    if cfg.model_name is not None:
        try:
            # Last: what can be said of a config.json or a tensor says more than that it has changed.
            verify_files(Path(cfg.model_name))
        except CheckpointError as err:
            raise ConfigError(f"policy.draft.model_name: {err}") from err
    if tokenizer_dir is not None:
        check_placeholder(spec, known_tokens(Path(tokenizer_dir)))
    return spec


def _warn_about_policy(raw: Mapping[str, Any], policy_name: str | None) -> None:
    """A copy under another path is the same policy, so only the last part of a name is compared."""
    named = verifier_name(raw)
    if named is None or policy_name is None or Path(named).name == Path(policy_name).name:
        return
    _LOG.warning(
        "policy.draft.model_name: the draft was made for the policy %s; policy.model_name is %s. If that is another "
        "model, little will be accepted at first",
        shown(named),
        policy_name,
    )


def _check_layouts(cfg: DraftConfig, spec: DraftSpec) -> None:
    """Write the config.json of each layout once, so that one that has no such draft is not met at the first save."""
    if "speculators" in cfg.export_layouts:
        verifier = Verifier("the policy", ())
        adapter_of(cfg.algo).write_speculators(
            spec.architecture, dtype=spec.dtype, k=spec.num_speculative_tokens, verifier=verifier
        )


def known_tokens(directory: Path) -> dict[str, int]:
    """The tokenizer's vocabulary without added tokens; empty when it is not in a form that can be read here.

    Args:
        directory: of the tokenizer.

    Raises:
        ConfigError: the file cannot be read.
    """
    for name, keys in (("tokenizer.json", ("model", "vocab")), ("vocab.json", ())):
        if not (directory / name).is_file():
            continue
        try:
            table: Any = read_json_object(directory / name, max_bytes=_MAX_TOKENIZER_BYTES, is_strict=False)
        except CheckpointError as err:
            raise ConfigError(f"policy.tokenizer.name: {err}") from err
        for key in keys:
            table = table.get(key, {}) if isinstance(table, dict) else {}
        if isinstance(table, dict):
            return {text: number for text, number in table.items() if isinstance(number, int)}
    return {}


def build_draft_runtime(
    cfg: DraftConfigBase,
    spec: DraftSpec,
    *,
    policy_model: nn.Module,
    device: torch.device | str,
    dtype: torch.dtype | str,
    draft_dir: str | None,
    seed: int,
) -> _DraftRuntimeBase:
    """Build the draft beside a policy. Collective when the policy is sharded.

    Args:
        cfg: `policy.draft`.
        spec: what `resolve_spec` decided.
        policy_model: the policy, whose embedding, head and final norm a new draft starts from.
        device: where the draft lives.
        dtype: of the draft's computations once it is parallelized; parameters stay fp32.
        draft_dir: weights to load; None = a new draft.
        seed: of the initialisation and of random draws.
    """
    return _load(_entry(spec.algo).runtime).build(
        cfg, spec, policy_model=policy_model, device=device, dtype=dtype, draft_dir=draft_dir, seed=seed
    )
