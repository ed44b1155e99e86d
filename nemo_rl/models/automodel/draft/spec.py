"""`DraftSpec`: all that driver, workers and engine need to know of the draft, resolved once on the driver.

Everything that can be wrong with a draft and its policy is found here, before Ray or an engine starts. No torch.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.models.automodel.draft.adapters.base import K_KEY, DraftAdapter, Serving, SourceConfig
from nemo_rl.models.automodel.draft.adapters.fields import feature_ids_from_layer_outputs, flat_rope
from nemo_rl.models.automodel.draft.adapters.names import check_tensor_shapes, check_zeros, normalize_names
from nemo_rl.models.automodel.draft.architecture import EMBEDDING, HEAD, DraftArchitecture
from nemo_rl.models.automodel.draft.config import DraftConfigBase
from nemo_rl.models.automodel.draft.vocab import VocabMap, VocabMapError
from nemo_rl.models.automodel.draft.weight_files import (
    WeightFiles,
    check_dtypes,
    is_zero,
    pickle_refusal,
    read_integers,
)

__all__ = ["DraftSpec", "check_placeholder", "read_vocabulary", "resolve_draft_spec", "text_config"]

_LOG = logging.getLogger(__name__)

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of an attention head that the engine's CPU attention has code for."""
_GEOMETRY_KEYS = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class DraftSpec:
    """The draft of a run.

    Attributes:
        algo: draft algorithm.
        architecture: shape of the draft.
        source: `scratch`, or `directory` when weights are loaded.
        num_target_layers: decoder layers of the policy.
        num_speculative_tokens: tokens proposed per step; of a draft that is not served, as many as it could propose.
        max_model_len: longest sequence of the engine.
        dtype: of published and exported weights: `float32`, `bfloat16`, `float16`.
        initializer_range: standard deviation of new matrices.
        vocab_ids: target id of each draft id; None = every id, or, for a pickled checkpoint, read by the worker.
        serving: how the engine runs it; None = it does not.
        frozen: names of tensors that training leaves alone.
        is_static: no tensor is trained, and the engine keeps what it loaded.
    """

    algo: str
    architecture: DraftArchitecture
    source: Literal["scratch", "directory"]
    num_target_layers: int
    num_speculative_tokens: int
    max_model_len: int
    dtype: str
    initializer_range: float
    vocab_ids: tuple[int, ...] | None
    serving: Serving | None
    frozen: tuple[str, ...] = ()
    is_static: bool = False

    @property
    def trained_names(self) -> tuple[str, ...]:
        """Names of the tensors that training changes."""
        return tuple(name for name in self.architecture.trained_shapes() if name not in self.frozen)

    @property
    def published_names(self) -> tuple[str, ...]:
        """Names of the tensors that each refit sends to the engine: none of a draft that is static or not served."""
        if self.serving is None:
            return ()
        if self.is_static:
            # It does not change, but the policy's rows that it carries do.
            return (HEAD,) if self.architecture.has_live_head else ()
        return tuple(name for name in self.architecture.published_shapes() if name not in self.frozen)

    def kept_names(self, sent: Collection[str]) -> tuple[str, ...]:
        """Names of the draft's own tensors that the engine loads once: frozen ones, all of a static draft.

        Args:
            sent: names of the tensors that each refit sends.
        """
        arch = self.architecture
        return tuple(name for name in (*arch.published_shapes(), *arch.frozen_shapes()) if name not in sent)

    @property
    def serving_extension(self) -> str | None:
        """`module:function` that the engine process calls before it builds the engine."""
        return None if self.serving is None else self.serving.extension

    def speculative_config(self, *, model_dir: str) -> dict[str, Any] | None:
        """What the engine's `speculative_config` must hold to serve the draft; None = it is not served.

        Args:
            model_dir: where it was exported to.
        """
        if self.serving is None:
            return None
        return {
            "method": self.serving.method,
            "model": model_dir,
            "num_speculative_tokens": self.num_speculative_tokens,
            **self.serving.options,
        }

    def describe(self) -> str:
        """One line for a person: algorithm, size, features, where the weights come from."""
        arch = self.architecture
        origin = "built from the policy" if self.source == "scratch" else "loaded"
        layers = f"{arch.num_hidden_layers} layer{'' if arch.num_hidden_layers == 1 else 's'}"
        features = "the final state" if arch.reads_final_state else f"layers {', '.join(map(str, arch.feature_ids))}"
        notes = [origin, *(["static"] if self.is_static else []), *([] if self.serving else ["not served"])]
        return (
            f"{self.algo}, {layers}, hidden size {arch.hidden_size}, {arch.draft_vocab_size} of "
            f"{arch.vocab_size} tokens, features after {features}, {', '.join(notes)}"
        )


def resolve_draft_spec(
    adapter: DraftAdapter[Any, Any],
    cfg: DraftConfigBase,
    *,
    policy_config: Mapping[str, Any],
    draft_config: Mapping[str, Any] | None,
    k: int | None,
    max_model_len: int,
    dtype: str,
    device: str | None = None,
    weight_files: WeightFiles | None = None,
    vocab_ids: Sequence[int] | None = None,
    problems: list[str] | None = None,
) -> DraftSpec:
    """Decide what the draft is, or say what does not fit.

    Args:
        adapter: of the draft's algorithm.
        cfg: `policy.draft`.
        policy_config: config.json of the policy.
        draft_config: config.json of `policy.draft.model_name`; None = build from scratch.
        k: tokens proposed per step; None is allowed for a draft that is not served.
        max_model_len: longest sequence of the engine.
        dtype: of the engine.
        device: `cpu` or `cuda`, when known; checks what the engine's attention can do there.
        weight_files: weights of `policy.draft.model_name`, checked by name and shape when given.
        vocab_ids: target id of each draft id, for a draft from scratch that proposes only some ids.
        problems: takes up what does not fit, as far as that leaves something to go on with, instead of its being
            raised; the result is to be looked at only.

    Raises:
        ConfigError: with the key, the value, what is allowed and what to do.
    """
    policy = text_config(policy_config)
    num_layers = int(policy["num_hidden_layers"])
    k = k if cfg.serve else None
    with _noting(problems):
        if cfg.serve and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
            raise ConfigError(f"{K_KEY}: got {k!r}; must be an integer >= 1. Set it to the tokens to propose per step.")
    if draft_config is None:
        arch = _from_scratch(adapter, cfg, policy, k)
    else:
        source = adapter.read_config(draft_config)
        adapter.check_source(cfg, source)
        arch = _from_source(adapter, cfg, source, num_layers)
    with _noting(problems):
        if not arch.reads_final_state:
            _check_feature_ids(arch.feature_ids, num_layers, allow_boundary=cfg.allow_boundary_layers)
    with _noting(problems):
        _check_against_policy(arch, policy)
    with _noting(problems):
        arch = _cover_positions(arch, max_model_len, k=k, policy=policy)
    with _noting(problems):
        _check_geometry(arch, device)
    with _noting(problems):
        adapter.check(cfg, arch, policy=policy, k=k)
    limit = adapter.max_num_speculative_tokens(cfg, arch)
    with _noting(problems):
        if k is not None and limit is not None and k > limit:
            raise ConfigError(
                f"{K_KEY}: got {k}; the draft is trained to propose at most {limit}. Lower it or set "
                f"policy.draft.{adapter.depth_key} >= {k}."
            )
    ids = frozen = None
    with _noting(problems):
        ids = _vocabulary(cfg, arch, is_scratch=draft_config is None, weight_files=weight_files, given=vocab_ids)
    with _noting(problems):
        frozen = _frozen_names(cfg, arch)
    return DraftSpec(
        algo=adapter.algo,
        architecture=arch,
        source="scratch" if draft_config is None else "directory",
        num_target_layers=num_layers,
        num_speculative_tokens=k or limit or 1,
        max_model_len=max_model_len,
        dtype=dtype,
        initializer_range=float(policy.get("initializer_range") or 0.02),
        vocab_ids=ids,
        serving=adapter.serving(arch, device=device) if cfg.serve else None,
        frozen=frozen or (),
        is_static=cfg.static or cfg.loss_weight == 0,
    )


@contextmanager
def _noting(problems: list[str] | None) -> Iterator[None]:
    """Put a refusal on the list, where there is one."""
    try:
        yield
    except ConfigError as err:
        if problems is None:
            raise
        problems.append(str(err))


def check_placeholder(spec: DraftSpec, tokens: Mapping[str, int]) -> None:
    """Refuse a placeholder that stands for a token which text contains or the draft proposes.

    Args:
        spec: of the draft.
        tokens: the tokenizer's vocabulary without added special tokens, text to id.

    Raises:
        ConfigError: the placeholder is in use.
    """
    placeholder = spec.architecture.placeholder_id
    if placeholder is None:
        return
    texts = {number: text for text, number in tokens.items()}
    use = None
    if spec.vocab_ids is not None and placeholder in spec.vocab_ids:
        use = "one of the ids that the draft proposes"
    if placeholder in texts:
        use = f"the token {texts[placeholder]!r} of the policy's tokenizer"
    if use is not None:
        vocab = spec.architecture.vocab_size
        unused = next((i for i in range(vocab - 1, -1, -1) if i not in texts), None)
        example = "" if unused is None else f", e.g. {unused}"
        raise ConfigError(
            f"policy.draft.mask_token_id: got {placeholder}, which is {use}; must be an id that never occurs. Use a "
            f"reserved special token or an id below {vocab} that the tokenizer does not know{example}."
        )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a policy config.

    Args:
        config: config.json of the policy.

    Raises:
        ConfigError: it lacks a size that the draft needs.
    """
    inner = config.get("text_config")
    config = inner if isinstance(inner, Mapping) and "num_hidden_layers" not in config else config
    missing = [k for k in ("num_hidden_layers", "hidden_size", "vocab_size") if not config.get(k)]
    if missing:
        raise ConfigError(
            f"policy.model_name: its config.json lacks {missing}, which the draft needs. Complete the file."
        )
    return config


def _frozen_names(cfg: DraftConfigBase, arch: DraftArchitecture) -> tuple[str, ...]:
    """Tensor names under the parts that `freeze` lists."""
    trained = arch.trained_shapes()
    frozen: set[str] = set()
    for part in cfg.freeze:
        names = {name for name in trained if name == part or name.startswith(f"{part}.")}
        if not names:
            parts = sorted({name.split(".")[0] for name in trained})
            reason = "is the policy's" if f"{part}.weight" in (EMBEDDING, HEAD) else "is no part of this draft"
            raise ConfigError(
                f"policy.draft.freeze: got {part!r}, which {reason}; must be one of {parts}, or a longer piece of a "
                "tensor's name such as layers.0.mlp. Correct or remove it."
            )
        frozen |= names
    if frozen == set(trained):
        raise ConfigError(
            f"policy.draft.freeze: got {list(cfg.freeze)}, which leaves nothing to train. Set policy.draft.static: "
            "true to serve a draft without training it."
        )
    return tuple(name for name in trained if name in frozen)


# -- from scratch ----------------------------------------------------------------------------------------------------


def _from_scratch(
    adapter: DraftAdapter[Any, Any], cfg: DraftConfigBase, policy: Mapping[str, Any], k: int | None
) -> DraftArchitecture:
    hidden = int(policy["hidden_size"])
    heads = cfg.num_attention_heads or policy.get("num_attention_heads")
    sizes: dict[str, Any] = {
        "intermediate_size": cfg.intermediate_size or policy.get("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": cfg.num_key_value_heads or policy.get("num_key_value_heads") or heads,
        # A policy config without the field means hidden / heads.
        "head_dim": cfg.head_dim
        or policy.get("head_dim")
        or (hidden // int(policy["num_attention_heads"]) if policy.get("num_attention_heads") else None),
    }
    for key, value in sizes.items():
        if not value:
            raise ConfigError(f"policy.draft.{key}: got null and the policy's config.json has none either. Set it.")
    if policy.get("rms_norm_eps") is None:
        raise ConfigError("policy.model_name: its config.json lacks rms_norm_eps, which the draft takes over. Add it.")
    if not policy.get("max_position_embeddings"):
        raise ConfigError("policy.model_name: its config.json lacks max_position_embeddings. Add it.")
    vocab = int(policy["vocab_size"])
    switches = {key: _stated(cfg, key, default) for key, default in adapter.switches.items()}
    fields: dict[str, Any] = {key: int(value) for key, value in sizes.items()}
    return adapter.architecture(
        layer_family=adapter.layer_family,
        hidden_size=hidden,
        target_hidden_size=hidden,
        num_hidden_layers=cfg.num_layers or adapter.default_num_layers,
        rms_norm_eps=float(policy["rms_norm_eps"]),
        vocab_size=vocab,
        draft_vocab_size=vocab if cfg.draft_vocab_size is None else cfg.draft_vocab_size,
        feature_ids=_new_ids(adapter, cfg, int(policy["num_hidden_layers"])),
        rope=flat_rope(policy, key="policy.model_name"),
        max_position_embeddings=int(policy["max_position_embeddings"]),
        **fields,
        **switches,
        **adapter.new_fields(cfg, policy=policy, k=k),
    )


def _stated(cfg: DraftConfigBase, key: str, default: Any) -> Any:
    value = getattr(cfg, key)
    return default if value is None else value


def _new_ids(adapter: DraftAdapter[Any, Any], cfg: DraftConfigBase, num_layers: int) -> tuple[int, ...]:
    if adapter.architecture.reads_final_state:
        if cfg.aux_layer_indices is not None:
            raise ConfigError(
                f"policy.draft.aux_layer_indices: got {list(cfg.aux_layer_indices)}; a draft of algorithm "
                f"{adapter.algo} reads the policy's final state only. Remove the key."
            )
        return ()
    if cfg.aux_layer_indices is not None:
        return feature_ids_from_layer_outputs(cfg.aux_layer_indices)
    return adapter.default_feature_ids(num_layers)


# -- from a directory ------------------------------------------------------------------------------------------------


def _from_source(
    adapter: DraftAdapter[Any, Any], cfg: DraftConfigBase, source: SourceConfig, num_layers: int
) -> DraftArchitecture:
    fields = adapter.loaded_fields(cfg, source)
    keys = {key: key for key in (*_GEOMETRY_KEYS, "draft_vocab_size", *adapter.switches)}
    for key, name in {**keys, "num_layers": "num_hidden_layers"}.items():
        value = getattr(cfg, key)
        if fields[name] is None:
            # The file leaves it open; `check_source` saw to it that the configuration does not.
            fields[name] = value
        if value is not None and fields[name] != value:
            raise ConfigError(
                f"policy.draft.{key}: got {value}; the draft in policy.draft.model_name has {fields[name]}. "
                f"Remove the key or set it to {fields[name]}."
            )
    return adapter.architecture(**fields, feature_ids=_source_ids(adapter, cfg, source, num_layers))


def _source_ids(
    adapter: DraftAdapter[Any, Any], cfg: DraftConfigBase, source: SourceConfig, num_layers: int
) -> tuple[int, ...]:
    if adapter.architecture.reads_final_state:
        return _new_ids(adapter, cfg, num_layers)
    chosen = None if cfg.aux_layer_indices is None else feature_ids_from_layer_outputs(cfg.aux_layer_indices)
    if source.feature_ids is not None:
        if chosen is not None and chosen != source.feature_ids:
            raise ConfigError(
                f"policy.draft.aux_layer_indices: got {[i - 1 for i in chosen]}; the draft was trained on "
                f"{[i - 1 for i in source.feature_ids]}. Remove the key."
            )
        return source.feature_ids
    if chosen is None:
        if source.publisher == "automodel":
            raise ConfigError(
                "policy.draft.aux_layer_indices: got null, and the draft's publisher never writes the layers that it "
                "was trained on. Set them (counted from 0)."
            )
        chosen = adapter.default_feature_ids(num_layers)
    if source.num_features not in (None, len(chosen)):
        raise ConfigError(
            f"policy.draft.aux_layer_indices: got {len(chosen)} layers; it reads {source.num_features}. Set that many."
        )
    return chosen


# -- checks ----------------------------------------------------------------------------------------------------------


def _check_feature_ids(ids: Sequence[int], num_layers: int, *, allow_boundary: bool) -> None:
    low, high = (0, num_layers) if allow_boundary else (1, num_layers - 1)
    shown = [i - 1 for i in ids]
    if list(ids) != sorted(set(ids)) or not ids:
        raise ConfigError(
            f"policy.draft.aux_layer_indices: got {shown}; must be distinct and increasing, because the engine sorts "
            "them and drops repeated ones."
        )
    outside = [i - 1 for i in ids if not low <= i <= high]
    if outside:
        raise ConfigError(
            f"policy.draft.aux_layer_indices: got {shown}; {outside} is outside {low - 1}..{high - 1} for a policy of "
            f"{num_layers} layers. Choose others, or set policy.draft.allow_boundary_layers for -1 and the last one."
        )


def _check_against_policy(arch: DraftArchitecture, policy: Mapping[str, Any]) -> None:
    for key, own, what in (
        ("hidden_size", arch.target_hidden_size, "features"),
        ("vocab_size", arch.vocab_size, "vocabulary"),
    ):
        if own != policy[key]:
            raise ConfigError(
                f"policy.draft.model_name: the draft was made for {what} of size {own}; the policy's {key} is "
                f"{policy[key]}. Use a draft of this policy."
            )


def _cover_positions(
    arch: DraftArchitecture, max_model_len: int, *, k: int | None, policy: Mapping[str, Any]
) -> DraftArchitecture:
    """Make the draft's RoPE table as long as what the engine indexes it with.

    The engine is started K + 1 positions longer than sequences may be, as far as the policy has them, and its draft
    runs into those; behind the table's end it would stop drafting, or read memory of something else.
    """
    needed = max_model_len + (0 if k is None else k + 1)
    if isinstance(policy.get("max_position_embeddings"), int):
        needed = max(max_model_len, min(needed, policy["max_position_embeddings"]))
    if arch.max_position_embeddings >= needed:
        return arch
    if arch.rope["rope_type"] != "default":
        raise ConfigError(
            f"policy.draft.model_name: its RoPE table ({arch.rope['rope_type']}) covers {arch.max_position_embeddings} "
            f"positions, policy.generation.vllm_cfg.max_model_len is {max_model_len} and drafting needs "
            f"{needed - max_model_len} more. Lower max_model_len, or raise max_position_embeddings in the draft's "
            "config.json if its scaling allows that."
        )
    # A plain table has no end: the frequencies do not depend on it.
    return dataclasses.replace(arch, max_position_embeddings=needed)


def _check_geometry(arch: DraftArchitecture, device: str | None) -> None:
    if arch.num_attention_heads % arch.num_key_value_heads:
        raise ConfigError(
            f"policy.draft.num_key_value_heads: got {arch.num_key_value_heads}; must divide the "
            f"{arch.num_attention_heads} query heads."
        )
    if arch.head_dim % 2:
        raise ConfigError(f"policy.draft.head_dim: got {arch.head_dim}; must be even for rotary positions.")
    if device == "cpu" and arch.head_dim not in CPU_HEAD_DIMS:
        raise ConfigError(
            f"policy.draft.head_dim: got {arch.head_dim}; the engine's CPU attention supports {list(CPU_HEAD_DIMS)}. "
            "Set policy.draft.head_dim to one of them."
        )


# -- vocabulary and weights ------------------------------------------------------------------------------------------


def _vocabulary(
    cfg: DraftConfigBase,
    arch: DraftArchitecture,
    *,
    is_scratch: bool,
    weight_files: WeightFiles | None,
    given: Sequence[int] | None,
) -> tuple[int, ...] | None:
    size, total = arch.draft_vocab_size, arch.vocab_size
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= total:
        raise ConfigError(
            f"policy.draft.draft_vocab_size: got {size!r}; must be an integer from 1 to {total}, the policy's."
        )
    if not is_scratch:
        return None if weight_files is None else _checked_weights(cfg, arch, weight_files)
    if not arch.has_vocab_map:
        return None
    if given is None:
        raise ConfigError(
            f"policy.draft.draft_vocab_size: got {size} of {total} for a draft from scratch; which ids it holds must "
            "come from token counts. Make a file of them with tools/draft_vocab.py build and name it in "
            "policy.draft.vocab_file; or set the size to null, or give policy.draft.model_name, a directory with a d2t."
        )
    try:
        mapping = VocabMap(tuple(given), total)
    except VocabMapError as err:
        raise ConfigError(f"policy.draft.draft_vocab_size: the given ids do not fit: {err}.") from err
    if len(mapping.ids) != size:
        raise ConfigError(f"policy.draft.draft_vocab_size: got {size}, and {len(mapping.ids)} ids. Make them equal.")
    return mapping.ids


def _checked_weights(cfg: DraftConfigBase, arch: DraftArchitecture, files: WeightFiles) -> tuple[int, ...] | None:
    if files.pickle is not None:
        if not cfg.trust_pickle:
            raise ConfigError(pickle_refusal(files.pickle))
        return None
    try:
        names = normalize_names(files.tensors)
        stored = {name: files.tensors[original] for name, original in names.canonical.items()}
        if names.dropped:
            _LOG.info(
                "policy.draft.model_name: %d tensors are left out, which are derived or the policy's: %s",
                len(names.dropped),
                ", ".join(sorted(names.dropped)[:5]),
            )
        check_dtypes({name: t.dtype for name, t in stored.items()})
        check_tensor_shapes({name: t.shape for name, t in stored.items()}, arch)
        check_zeros({name: is_zero(stored[name]) for name in arch.zero_shapes() if name in stored})
        tables = {name: read_integers(stored[name]) for name in ("d2t", "t2d") if name in stored}
        mapping = read_vocabulary(tables, arch)
    except (CheckpointError, VocabMapError) as err:
        raise ConfigError(f"policy.draft.model_name: {cfg.model_name}: {err}") from err
    return None if mapping is None else mapping.ids


def read_vocabulary(tables: Mapping[str, Sequence[int]], arch: DraftArchitecture) -> VocabMap | None:
    """The map of a checkpoint.

    Args:
        tables: `d2t` and `t2d` where the checkpoint has them, as integers.
        arch: the draft.

    Returns:
        None when draft ids are target ids.
    """
    d2t, t2d = tables.get("d2t"), tables.get("t2d")
    if d2t is None:
        if arch.has_vocab_map:
            raise VocabMapError(
                f"the draft proposes {arch.draft_vocab_size} of {arch.vocab_size} ids and has no d2t that says which"
            )
        return None
    mapping = VocabMap.from_tables(d2t, vocab_size=arch.vocab_size, draft_vocab_size=arch.draft_vocab_size, t2d=t2d)
    if not arch.has_vocab_map:
        if not mapping.is_identity:
            raise VocabMapError("the draft proposes every id, so d2t must be all zeros (it holds offsets)")
        return None
    return mapping
