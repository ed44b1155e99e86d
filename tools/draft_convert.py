"""Write a published draft anew: another layout, dtype or sharding, fewer ids, a repaired d2t, safetensors for pickle.

What the files leave open is settled by key=value with the names of policy.draft.*, e.g. norm_output=true. The result is
a directory for policy.draft.model_name, or for vLLM.

Example:
  tools/draft_convert.py path/to/draft --out results/draft --layout speculators --policy Qwen/Qwen3-8B
  tools/draft_convert.py path/to/draft --out results/draft-32k --vocab vocab.json --policy path/to/policy
  tools/draft_convert.py path/to/draft --out results/draft --repair-d2t aux_layer_indices=[1,17,32]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.errors import ConfigError, NemoRLError
from nemo_rl.models.automodel.draft.adapters.base import LAYOUTS, Verifier
from nemo_rl.models.automodel.draft.config import DraftConfigBase
from nemo_rl.models.automodel.draft.registry import ALIASES, DRAFT_ALGORITHMS, adapter_of, algorithm_of
from nemo_rl.models.automodel.draft.vocab_file import read_vocab_file
from nemo_rl.models.automodel.draft.weight_files import member
from nemo_rl.utils.config import build_master_config
from nemo_rl.utils.model_files import find_model_dir, read_model_config
from nemo_rl.utils.safe_files import read_json_object
from nemo_rl.utils.yaml_reader import parse_yaml

if TYPE_CHECKING:
    from nemo_rl.models.automodel.draft.convert import PublishedDraft

PREFIX = "policy.draft."
DTYPES = ("float32", "bfloat16", "float16")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
OWN_OPTIONS = {
    "algo": "--algo",
    "model_name": "the directory",
    "trust_pickle": "--trust-pickle",
    "export_layouts": "--layout",
    "vocab_file": "--vocab",
}
"""Keys of policy.draft that the command line has other words for."""


def settings_of(texts: Sequence[str], algo: str, *, directory: Path, trust_pickle: bool) -> DraftConfigBase:
    """Turn key=value texts into `policy.draft`.

    Args:
        texts: as given on the command line.
        algo: draft algorithm.
        directory: of the draft.
        trust_pickle: allow pickles.

    Raises:
        ConfigError: no such key, or a value that it cannot have.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, mark, value = text.partition("=")
        key = name.removeprefix(PREFIX)
        if not mark:
            raise ConfigError(f"{text}: is no setting; must be key=value. Correct it.")
        if key in OWN_OPTIONS:
            raise ConfigError(f"{text}: is not set this way; must be given as {OWN_OPTIONS[key]}. Remove it here.")
        values[key] = parse_yaml(value)
    section = values | {"algo": algo, "model_name": str(directory), "trust_pickle": trust_pickle}
    # The schema wants a policy; only the draft's part is read.
    return build_master_config({"policy": {"model_name": str(directory), "draft": section}}).policy.draft


def shard_bytes(text: str) -> int:
    """Parse a size such as `4G` or `500M`."""
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    number = text[: len(text) - len(unit)]
    if unit not in UNITS or not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; must be a number of bytes with K, M, G or nothing behind it")
    return int(number) * UNITS[unit]


def check_out(out: Path, source: Path, *, is_replacing: bool) -> None:
    """Refuse to write where something is that the command did not make.

    Args:
        out: directory to write.
        source: directory that is read.
        is_replacing: files in `out` may be replaced.
    """
    if out.exists() and out.samefile(source):
        raise ConfigError(f"--out: got {out}, the directory that is read; must be another one.")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out: got {out}, a file; must be a directory.")
    if out.is_dir() and any(out.iterdir()) and not is_replacing:
        raise ConfigError(f"--out: got {out}, which holds files; must be empty or new, or give --overwrite.")


def convert(options: argparse.Namespace) -> PublishedDraft:
    """Read, change and write; return what was written."""
    directory: Path = options.directory
    if not directory.is_dir():
        raise ConfigError(f"{directory}: there is no such directory. Give one with config.json and weights.")
    check_out(options.out, directory, is_replacing=options.overwrite)
    algo = options.algo or algorithm_of(read_json_object(member(directory, "config.json")))
    adapter = adapter_of(algo)
    cfg = settings_of(options.settings, algo, directory=directory, trust_pickle=options.trust_pickle)
    policy_dir = None if options.policy is None else find_model_dir(options.policy, key="--policy")
    policy_config = None if policy_dir is None else read_model_config(policy_dir, key="--policy")

    # Needs torch: a wrong command line need not wait for it.
    from nemo_rl.models.automodel.draft.convert import policy_head_rows, prune, read_published, write_published

    draft = read_published(directory, adapter, cfg, policy_config=policy_config, repair=options.repair)
    if options.vocab is not None:
        rows = None if policy_dir is None else lambda ids: policy_head_rows(policy_dir, ids)
        draft = prune(draft, read_vocab_file(options.vocab, key="--vocab").vocab, policy_rows=rows)
    dtype = options.dtype or draft.dtype
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype: got nothing, and the weights have several; must be one of {list(DTYPES)}. Set it.")
    write_published(
        options.out,
        draft,
        layout=options.layout,
        dtype=dtype,
        k=options.num_speculative_tokens,
        verifier=verifier_of(options.policy, policy_config),
        **({} if options.max_shard_size is None else {"max_shard_bytes": options.max_shard_size}),
    )
    arch = draft.architecture
    print(f"{directory}: {algo}, layout of {draft.source.publisher}, features after layers {list(arch.feature_ids)}")
    print(
        f"{options.out}: layout {options.layout}, {dtype}, {arch.draft_vocab_size} of {arch.vocab_size} ids, "
        f"{len(draft.tensors)} tensors"
    )
    return draft


def verifier_of(name: str | None, policy_config: Mapping[str, Any] | None) -> Verifier | None:
    """The policy as the speculators layout names it; None without `--policy`."""
    if name is None or policy_config is None:
        return None
    return Verifier(name, tuple(str(text) for text in policy_config.get("architectures") or ()))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="draft as it was published")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the draft that --out holds")
    names = sorted({*DRAFT_ALGORITHMS, *ALIASES})
    parser.add_argument("--algo", choices=names, help="algorithm; default: what config.json says")
    parser.add_argument("--layout", choices=LAYOUTS, default="native", help="layout to write (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: as they are")
    parser.add_argument("--max-shard-size", type=shard_bytes, metavar="SIZE", help="e.g. 2G; default: 4G")
    parser.add_argument("--policy", metavar="DIR", help="the draft's policy: its sizes, name and head")
    parser.add_argument("--num-speculative-tokens", type=int, metavar="K", help="stated in the speculators layout")
    parser.add_argument("--vocab", type=Path, metavar="FILE", help="keep the ids of this file (tools/draft_vocab.py)")
    parser.add_argument(
        "--repair-d2t",
        dest="repair",
        action="store_const",
        const="auto",
        default="no",
        help="d2t may hold target ids instead of offsets: find out, and repair it",
    )
    parser.add_argument(
        "--d2t-is-absolute",
        dest="repair",
        action="store_const",
        const="absolute",
        help="the same where nothing in the files tells: it does hold target ids",
    )
    parser.add_argument("--trust-pickle", action="store_true", help="read *.bin files (weights only)")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="keys of policy.draft")
    return parser.parse_intermixed_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Command line without the program's name; None takes the process's.

    Returns:
        Exit status: 0, 1 for a damaged draft or a failed write, 2 for input that cannot be used.
    """
    try:
        convert(parse_arguments(arguments))
    except NemoRLError as err:
        sys.stderr.write(f"error: {err}\n")
        return err.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
