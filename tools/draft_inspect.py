"""What a draft checkpoint is, whether it fits a policy, and what training and serving would make of it.

Reads config.json and the headers of the weights, never the weights. What the files leave open is settled by key=value
with the names of policy.draft.*, e.g. norm_output=true.

Example:
  tools/draft_inspect.py path/to/draft
  tools/draft_inspect.py path/to/draft --policy Qwen/Qwen3-8B --k 5 norm_output=true
  tools/draft_inspect.py path/to/draft --policy path/to/policy --json
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from nemo_rl.errors import CheckpointError, ConfigError, NemoRLError
from nemo_rl.models.automodel.draft.adapters.base import K_KEY, DraftAdapter, SourceConfig
from nemo_rl.models.automodel.draft.adapters.names import normalize_names
from nemo_rl.models.automodel.draft.architecture import EMBEDDING, HEAD, DraftArchitecture
from nemo_rl.models.automodel.draft.config import DraftConfigBase
from nemo_rl.models.automodel.draft.metadata import META_FILE, verify_files
from nemo_rl.models.automodel.draft.registry import MASK_EMBEDDING_FILE, adapter_of, algorithm_of, known_tokens
from nemo_rl.models.automodel.draft.spec import CPU_HEAD_DIMS, DraftSpec, check_placeholder, resolve_draft_spec
from nemo_rl.models.automodel.draft.weight_files import WeightFiles, find_weight_files, member
from nemo_rl.utils.config import build_master_config
from nemo_rl.utils.model_files import find_model_dir, read_model_config
from nemo_rl.utils.safe_files import read_json_object, shown
from nemo_rl.utils.yaml_reader import parse_yaml

T = TypeVar("T")

PREFIX = "policy.draft."
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_TABLES = ("d2t", "t2d")
_OPEN = re.compile(rf"{re.escape(PREFIX)}(\w+): got (?:null|nothing)\b")
_TRIES = 8


@dataclass
class Findings:
    """What was found, and what is wrong.

    Attributes:
        report: section to values, all of which JSON can hold.
        problems: what keeps a run from using the draft.
        questions: key of the configuration to what it has to answer.
        assumed: key to the answer with which the rest was looked at.
        exit_code: of the command.
    """

    report: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    questions: dict[str, str] = field(default_factory=dict)
    assumed: dict[str, Any] = field(default_factory=dict)
    exit_code: int = 0

    def note(self, text: str, *, exit_code: int = ConfigError.exit_code) -> None:
        """Put a problem on the list."""
        if text not in self.problems:
            self.problems.append(text)
        self.exit_code = max(self.exit_code, exit_code)

    def attempt(self, read: Callable[[], T]) -> T | None:
        """Result, or None after a problem was noted."""
        try:
            return read()
        except NemoRLError as err:
            self.note(str(err), exit_code=err.exit_code)
            return None


def inspect(
    directory: Path,
    *,
    policy_dir: Path | None = None,
    settings: Sequence[str] = (),
    k: int | None = None,
    device: str | None = None,
    max_model_len: int | None = None,
) -> Findings:
    """Look at a draft directory.

    Args:
        directory: of the draft.
        policy_dir: of the policy that it is for; None = what the draft says of it is believed.
        settings: `key=value` of `policy.draft`.
        k: tokens to propose per step; None = as many as it can.
        device: `cpu` or `cuda`; checks what the engine's attention can do there.
        max_model_len: longest sequence of the engine; None = whatever the draft covers.

    Raises:
        ConfigError: the settings or the policy cannot be read.
    """
    found = Findings()
    values = _values(settings)
    policy_config = None if policy_dir is None else read_model_config(policy_dir, key="--policy")
    raw = found.attempt(lambda: read_json_object(member(directory, "config.json")))
    files = found.attempt(lambda: find_weight_files(directory))
    found.attempt(lambda: verify_files(directory))
    if (directory / MASK_EMBEDDING_FILE).exists():
        found.note(
            f"{directory / MASK_EMBEDDING_FILE}: replaces the placeholder's embedding in the engine. Remove it, or use "
            "another draft."
        )
    found.report["checkpoint"] = {"directory": str(directory)} | _container(directory, files)
    if raw is None:
        return found
    algo = values.get("algo")
    if algo is None:
        try:
            algo = algorithm_of(raw)
        except ConfigError as err:
            found.questions["algo"] = str(err)
            found.exit_code = err.exit_code
            return found
    cfg = _section(directory, values | {"algo": algo})
    adapter = adapter_of(algo)
    source = found.attempt(lambda: adapter.read_config(raw))
    found.report["checkpoint"] |= {
        "algorithm": algo,
        "publisher": None if source is None else source.publisher,
        "layout": "speculators" if "speculators_model_type" in raw else "native",
        "is_ours": (directory / META_FILE).is_file(),
    }
    if source is None:
        return found
    spec = _resolved(
        found,
        adapter,
        cfg,
        source,
        raw,
        files,
        policy_config=policy_config,
        k=k,
        device=device,
        max_model_len=max_model_len,
    )
    if spec is not None:
        if policy_dir is not None:
            tokens = found.attempt(lambda: known_tokens(policy_dir))
            found.attempt(lambda: check_placeholder(spec, tokens or {}))
        found.report |= _described(spec, cfg, source, adapter, files, has_policy=policy_config is not None)
    return found


# -- settings --------------------------------------------------------------------------------------------------------


def _values(settings: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for text in settings:
        name, mark, value = text.partition("=")
        key = name.removeprefix(PREFIX)
        if not mark or not key or key == "model_name":
            raise ConfigError(
                f"{text}: must be key=value with a key of policy.draft other than model_name. Correct it."
            )
        values[key] = parse_yaml(value)
    return values


def _section(directory: Path, values: Mapping[str, Any]) -> DraftConfigBase:
    # The schema wants a policy; only the draft's part is read.
    section = {"enabled": False} | dict(values) | {"model_name": str(directory)}
    return build_master_config({"policy": {"model_name": str(directory), "draft": section}}).policy.draft


# -- resolving -------------------------------------------------------------------------------------------------------


def _resolved(
    found: Findings,
    adapter: DraftAdapter[Any, Any],
    cfg: DraftConfigBase,
    source: SourceConfig,
    raw: Mapping[str, Any],
    files: WeightFiles | None,
    *,
    policy_config: Mapping[str, Any] | None,
    k: int | None,
    device: str | None,
    max_model_len: int | None,
) -> DraftSpec | None:
    """Resolve the draft. Open questions are answered by a guess, so that the rest can be looked at."""

    def resolve(cfg: DraftConfigBase, k: int | None, problems: list[str]) -> DraftSpec:
        policy = _stated_policy(cfg, source) if policy_config is None else policy_config
        return resolve_draft_spec(
            adapter,
            cfg,
            policy_config=policy,
            draft_config=raw,
            k=k,
            max_model_len=max_model_len or 1,
            dtype=_dtype(policy_config, files),
            device=device,
            weight_files=files,
            problems=problems,
        )

    for _ in range(_TRIES):
        problems: list[str] = []
        try:
            # Not served first: which K it can propose is not known before.
            unserved = resolve(cfg.model_copy(update={"serve": False}), None, problems)
            if not cfg.serve:
                spec = unserved
            else:
                limit = adapter.max_num_speculative_tokens(cfg, unserved.architecture)
                spec = resolve(cfg, limit or 1 if k is None else k, problems)
        except ConfigError as err:
            key = _open_key(str(err), cfg)
            guess = None if key is None else _guess(key, adapter, source, files)
            if key is None or guess is None:
                found.note("\n".join(dict.fromkeys([*problems, str(err)])))
                return None
            found.questions[key], found.assumed[key] = str(err), guess
            found.exit_code = ConfigError.exit_code
            cfg = cfg.model_copy(update={key: guess})
            continue
        # What follows from a guess is no problem of the draft.
        doubtful = tuple(f"{PREFIX}{key}:" for key in found.questions) + ((K_KEY,) if found.questions else ())
        for text in problems:
            if not text.startswith(doubtful):
                found.note(text)
        return spec
    return None


def _open_key(text: str, cfg: DraftConfigBase) -> str | None:
    """Key that a refusal asks for, if the configuration has not set it."""
    match = _OPEN.match(text)
    key = None if match is None else match.group(1)
    return key if key is not None and getattr(cfg, key, ...) is None else None


def _guess(key: str, adapter: DraftAdapter[Any, Any], source: SourceConfig, files: WeightFiles | None) -> Any:
    if key == "aux_layer_indices":
        return tuple(range(_num_features(source, files) or len(adapter.default_feature_ids(64))))
    if key == "mask_token_id":
        return source.fields["vocab_size"] - 1
    return {"norm_output": True, "sample_from_anchor": True, "num_depths": 8, "block_size": 8}.get(key)


def _num_features(source: SourceConfig, files: WeightFiles | None) -> int | None:
    """Policy layers that the draft reads, as the width of its projection says."""
    if source.num_features is not None or files is None:
        return source.num_features
    width = source.fields["target_hidden_size"]
    for name, tensor in files.tensors.items():
        if name.endswith("fc.weight") and len(tensor.shape) == 2:
            return max(1, tensor.shape[1] // width)
    return None


def _stated_policy(cfg: DraftConfigBase, source: SourceConfig) -> dict[str, Any]:
    """The policy as far as the draft says what it is."""
    ids = source.feature_ids or tuple(i + 1 for i in cfg.aux_layer_indices or ())
    stated = source.fields.get("extra", {}).get("num_target_layers")
    return {
        # Nothing depends on the number but the range of the ids, and the default ids, which are not shown then.
        "num_hidden_layers": stated if isinstance(stated, int) and stated > 0 else max((*ids, 63)) + 1,
        "hidden_size": source.fields["target_hidden_size"],
        "vocab_size": source.fields["vocab_size"],
    }


def _dtype(policy_config: Mapping[str, Any] | None, files: WeightFiles | None) -> str:
    """Of the engine: the policy's, else that of most of the draft's weights."""
    config = policy_config or {}
    stated = config.get("dtype") or config.get("torch_dtype")
    if stated in BYTES:
        return stated
    sizes: Counter[str] = Counter()
    for tensor in files.tensors.values() if files is not None else ():
        if tensor.dtype in DTYPES:
            sizes[DTYPES[tensor.dtype]] += prod(tensor.shape)
    return sizes.most_common(1)[0][0] if sizes else "bfloat16"


# -- describing ------------------------------------------------------------------------------------------------------


def _container(directory: Path, files: WeightFiles | None) -> dict[str, Any]:
    if files is None:
        return {}
    dtypes: Counter[str] = Counter()
    for tensor in files.tensors.values():
        dtypes[tensor.dtype] += prod(tensor.shape)
    return {
        "files": [{"name": path.name, "bytes": path.stat().st_size} for path in files.files],
        "index": None if files.index is None else files.index.name,
        "ignored_files": [name if name.isprintable() else shown(name) for name in files.ignored],
        "is_pickle": files.pickle is not None,
        "tensors": len(files.tensors),
        "elements_by_dtype": dict(dtypes.most_common()),
    }


def _described(
    spec: DraftSpec,
    cfg: DraftConfigBase,
    source: SourceConfig,
    adapter: DraftAdapter[Any, Any],
    files: WeightFiles | None,
    *,
    has_policy: bool,
) -> dict[str, Any]:
    arch = spec.architecture
    origin = "file" if source.feature_ids is not None else "setting" if cfg.aux_layer_indices is not None else "default"
    is_known = origin != "default" or has_policy or arch.reads_final_state
    shapes = arch.published_shapes() | arch.frozen_shapes()
    kept = [name for name in arch.frozen_shapes() if name not in _TABLES]
    limit = adapter.max_num_speculative_tokens(cfg, arch)
    wide = arch.wide_names()
    return {
        "architecture": {
            "layers": f"{arch.num_hidden_layers} x {arch.layer_family}",
            "hidden_size": arch.hidden_size,
            "target_hidden_size": arch.target_hidden_size,
            "intermediate_size": arch.intermediate_size,
            "heads": f"{arch.num_attention_heads} query, {arch.num_key_value_heads} key/value, width {arch.head_dim}",
            "max_position_embeddings": arch.max_position_embeddings,
            "rope": dict(arch.rope),
            **_own_fields(arch),
        },
        "features": {
            "after_layers": list(arch.feature_ids) if is_known else None,
            "layer_outputs": [i - 1 for i in arch.feature_ids] if is_known else None,
            "said_by": "nobody; it reads the final state" if arch.reads_final_state else origin,
        },
        "vocabulary": {
            "draft": arch.draft_vocab_size,
            "policy": arch.vocab_size,
            "is_ascending": None if spec.vocab_ids is None else list(spec.vocab_ids) == sorted(spec.vocab_ids),
            "placeholder": arch.placeholder_id,
        },
        "training": {
            "trained": _group(arch, spec.trained_names, spec.dtype, is_off=spec.is_static),
            "frozen": _group(arch, [*spec.frozen, *kept], spec.dtype),
            "published_per_refit": _group(arch, spec.published_names, spec.dtype),
            "taken_from_policy": [name for name in (EMBEDDING, HEAD) if name not in shapes],
            "ignored_tensors": _ignored(arch, files),
            "float32_in_engine": sorted(wide),
        },
        "serving": {
            "is_served": cfg.serve,
            "dtype": spec.dtype,
            "num_speculative_tokens": spec.num_speculative_tokens if cfg.serve else None,
            "k_rule": adapter.k_rule,
            "k_limit": limit,
            **{device: _served(adapter, arch, device) for device in ("cuda", "cpu")},
            "export_layouts": list(adapter.layouts),
        },
    }


def _own_fields(arch: DraftArchitecture) -> dict[str, Any]:
    """What the algorithm adds to every draft's fields."""
    common = DraftArchitecture.__dataclass_fields__
    return {name: getattr(arch, name) for name in arch.__dataclass_fields__ if name not in common}


def _group(arch: DraftArchitecture, names: Sequence[str], dtype: str, *, is_off: bool = False) -> dict[str, int]:
    if is_off:
        names = ()
    shapes, wide = arch.published_shapes() | arch.frozen_shapes(), arch.wide_names()
    sizes = {name: prod(shapes[name]) for name in names}
    return {
        "tensors": len(sizes),
        "parameters": sum(sizes.values()),
        "bytes": sum(size * (4 if name in wide else BYTES[dtype]) for name, size in sizes.items()),
    }


def _ignored(arch: DraftArchitecture, files: WeightFiles | None) -> list[str]:
    """Tensors of the files that nothing reads."""
    try:
        names = normalize_names(() if files is None else files.tensors)
    except CheckpointError:  # reported among the problems
        return []
    used = (arch.published_shapes() | arch.frozen_shapes()).keys()
    return sorted({*names.dropped, *(stored for name, stored in names.canonical.items() if name not in used)})


def _served(adapter: DraftAdapter[Any, Any], arch: DraftArchitecture, device: str) -> dict[str, Any]:
    if device == "cpu" and arch.head_dim not in CPU_HEAD_DIMS:
        return {"method": None, "reason": f"heads of width {arch.head_dim}"}
    serving = adapter.serving(arch, device=device)
    return {"method": serving.method, "options": dict(serving.options), "extension": serving.extension}


# -- output ----------------------------------------------------------------------------------------------------------


def _print(found: Findings, *, has_policy: bool) -> None:
    from rich.console import Console  # after the arguments were understood
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(show_header=False)
    for title, section in found.report.items():
        table.add_section()
        table.add_row(Text(title, style="bold"))
        for name, value in section.items():
            for number, line in enumerate(_lines(value)):
                table.add_row(Text(f"  {name.replace('_', ' ')}" if number == 0 else ""), Text(line))
    console.print(table)
    for key, text in found.questions.items():
        console.print(Text(f"open: {text}", style="yellow"), soft_wrap=True)
        if key in found.assumed:
            console.print(Text(f"  (the table assumes {key}={json.dumps(found.assumed[key])})"), soft_wrap=True)
    for text in found.problems:
        console.print(Text(f"problem: {text}", style="red"), soft_wrap=True)
    if found.exit_code == 0:
        fit = "fits the policy" if has_policy else "can be used, as far as it can be told without --policy"
        console.print(Text(f"The draft {fit}.", style="green"), soft_wrap=True)
    elif not found.problems:
        console.print(Text("Nothing else is wrong once these keys are set.", style="yellow"), soft_wrap=True)


def _lines(value: Any) -> list[str]:
    """A value for a person, in one or more lines."""
    if isinstance(value, Mapping) and set(value) == {"tensors", "parameters", "bytes"}:
        return [f"{value['tensors']} tensors, {value['parameters']:,} parameters, {value['bytes']:,} bytes"]
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return [
            ", ".join(f"{inner:,} {key}" if key == "bytes" else str(inner) for key, inner in v.items()) for v in value
        ]
    if isinstance(value, Mapping) and "reason" in value:
        return [f"not possible ({value['reason']})"]
    if isinstance(value, Mapping):
        return [", ".join(f"{key} {_word(inner)}" for key, inner in value.items() if inner not in (None, {})) or "-"]
    if isinstance(value, list):
        return [", ".join(map(str, value)) or "none"]
    return [_word(value)]


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else str(value)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="of the draft")
    parser.add_argument("--policy", metavar="DIR", help="policy that the draft is for: directory or hub name")
    parser.add_argument("--k", type=int, help="tokens to propose per step; default: as many as it can")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="check what the engine can run there")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="longest sequence of the engine")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="keys of policy.draft")
    return parser.parse_intermixed_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: command line without the program's name; None takes the process's.

    Returns:
        Exit status: 0, 1 for damaged files, 2 for a draft that cannot be used, does not fit, or leaves something open.
    """
    options = parse_arguments(arguments)
    try:
        for name in ("k", "max_model_len"):
            if getattr(options, name) is not None and getattr(options, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')}: got {getattr(options, name)}; must be an integer >= 1.")
        if not options.directory.is_dir():
            raise ConfigError(
                f"{options.directory}: there is no such directory. Give one with config.json and weights."
            )
        policy_dir = None if options.policy is None else find_model_dir(options.policy, key="--policy")
        found = inspect(
            options.directory,
            policy_dir=policy_dir,
            settings=options.settings,
            k=options.k,
            device=options.device,
            max_model_len=options.max_model_len,
        )
    except NemoRLError as err:
        sys.stderr.write(f"error: {err}\n")
        return err.exit_code
    if options.json:
        questions = {f"{PREFIX}{key}": text for key, text in found.questions.items()}
        assumed = {f"{PREFIX}{key}": value for key, value in found.assumed.items()}
        whole = found.report | {"open_questions": questions, "assumed": assumed, "problems": found.problems}
        print(json.dumps(whole | {"fits": found.exit_code == 0}, indent=2))
    else:
        _print(found, has_policy=policy_dir is not None)
    return found.exit_code


if __name__ == "__main__":
    sys.exit(main())
