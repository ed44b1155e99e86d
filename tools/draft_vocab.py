"""Reduced draft vocabularies: choose the ids a draft proposes, look at a choice, check the tables of a draft.

  build      count tokens and write the most frequent ids to a file for policy.draft.vocab_file
  coverage   share of the tokens that a file holds, and which size would hold how much
  check      list everything that is wrong with a vocabulary file, or with d2t and t2d of a draft directory

Tokens are counted in recorded rollouts (--rollouts; what the policy really samples), or in the expected answers of a
recipe's training data (--data).

Example:
  tools/draft_vocab.py build --data recipe.yaml --rollouts results/rollouts --size 32000 --out vocab.json
  tools/draft_vocab.py coverage --data recipe.yaml --field generated_solution
  tools/draft_vocab.py check path/to/draft
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.data.tokenizer_identity import tokenizer_fingerprint
from nemo_rl.errors import ConfigError, NemoRLError
from nemo_rl.models.automodel.draft.vocab import (
    VocabMapError,
    coverage_by_size,
    coverage_of,
    select_vocab,
    selection_order,
    table_problems,
)
from nemo_rl.models.automodel.draft.vocab_file import (
    FORMAT,
    MAX_BYTES,
    VocabFile,
    check_owner,
    read_vocab_file,
    stop_ids,
    write_vocab_file,
)
from nemo_rl.utils.safe_files import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.algorithms.config import MasterConfig

EXIT_PROBLEMS = 1
SIZES = tuple(2**power for power in range(4, 19))
"""Sizes that a coverage table shows, as far as the vocabulary goes."""


@dataclass(frozen=True)
class Policy:
    """What the ids are ids of.

    Attributes:
        directory: of the policy.
        tokenizer_dir: of its tokenizer.
        tokenizer: loaded from there.
        vocab_size: rows of the policy's embedding.
        fingerprint: of the tokenizer.
    """

    directory: Path
    tokenizer_dir: Path
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    fingerprint: str


@dataclass(frozen=True)
class Counted:
    """Tokens of one source.

    Attributes:
        counts: target id to its number, without ids that do not occur.
        source: what was counted, for a person.
    """

    counts: Mapping[int, int]
    source: str


def policy_of(options: argparse.Namespace, cfg: MasterConfig | None) -> Policy:
    """Find and read the policy that the options or their recipe name."""
    from nemo_rl.data.tokenizer import load_tokenizer  # imports transformers when called
    from nemo_rl.models.automodel.draft.spec import text_config
    from nemo_rl.models.policy.config import TokenizerConfig
    from nemo_rl.utils.model_files import find_model_dir, read_model_config

    key, name = "--policy", options.policy
    if name is None:
        if cfg is None:
            raise ConfigError("--policy: got nothing; is required without --data. Name the policy's directory.")
        key, name = "policy.model_name", cfg.policy.model_name
    directory = find_model_dir(name, key=key)
    vocab_size = int(text_config(read_model_config(directory, key=key))["vocab_size"])
    settings = TokenizerConfig(name=str(directory)) if cfg is None else cfg.policy.tokenizer
    if options.policy is not None:
        settings = settings.model_copy(update={"name": str(directory)})
    tokenizer_dir = find_model_dir(settings.name, key="policy.tokenizer.name")
    fingerprint = tokenizer_fingerprint(tokenizer_dir)
    if fingerprint is None:
        raise ConfigError(
            f"policy.tokenizer.name: got {settings.name!r}; must hold tokenizer.json, vocab.json or tokenizer.model, "
            "by which a vocabulary file is tied to its tokenizer. Save the tokenizer there."
        )
    return Policy(directory, tokenizer_dir, load_tokenizer(settings), vocab_size, fingerprint)


def count(options: argparse.Namespace, cfg: MasterConfig | None, policy: Policy) -> Counted:
    """Count the tokens of the source that the options name."""
    if options.rollouts is not None:
        from nemo_rl.data import rollout_index
        from nemo_rl.data.rollout_store import RolloutReader  # needs torch

        reader = RolloutReader(options.rollouts)
        index = rollout_index.read_index(options.rollouts)
        recorded = None if index is None else index.identity.tokenizer
        if recorded != policy.fingerprint:
            raise ConfigError(
                f"--rollouts: got {options.rollouts}, recorded with tokenizer {recorded}; that of "
                f"{policy.tokenizer_dir} is {policy.fingerprint}. Name the policy that they were recorded with."
            )
        if reader.vocab_size != policy.vocab_size:
            raise ConfigError(
                f"--rollouts: got {options.rollouts}, recorded with a policy of {reader.vocab_size} ids; this policy "
                f"has {policy.vocab_size}. Name the policy that they were recorded with."
            )
        return Counted(reader.token_counts(), f"{reader.num_samples} samples of {options.rollouts}")
    assert cfg is not None, "one of --data and --rollouts is required"
    from itertools import islice

    from nemo_rl.data.token_counts import answer_texts, count_texts  # needs torch

    texts = answer_texts(cfg.data, seed=cfg.grpo.seed, field=options.field)
    counts = count_texts(islice(texts, options.max_samples), policy.tokenizer, vocab_size=policy.vocab_size)
    found = {i: int(counts[i]) for i in counts.nonzero().flatten().tolist()}
    field = "expected answers" if options.field is None else f"field {options.field}"
    return Counted(found, f"{field} of data.dataset_name {cfg.data.dataset_name}")


def kept_ids(policy: Policy, wanted: Sequence[int]) -> dict[int, str]:
    """Ids that must be in the vocabulary, and why."""
    template = policy.tokenizer.chat_template or ""
    text = template if isinstance(template, str) else " ".join(map(str, template.values()))
    added = policy.tokenizer.added_tokens_decoder
    kept = {int(i): f"in the chat template: {token.content!r}" for i, token in added.items() if token.content in text}
    kept |= dict.fromkeys(stop_ids(policy.directory), "ends a response (config.json, generation_config.json)")
    if policy.tokenizer.eos_token_id is not None:
        kept[int(policy.tokenizer.eos_token_id)] = "end of sequence of the tokenizer"
    return kept | dict.fromkeys(wanted, "--keep")


def banned_ids(policy: Policy, cfg: MasterConfig | None, wanted: Sequence[int]) -> set[int]:
    """Ids that must not be proposed: placeholders, and rows that pad the vocabulary."""
    placeholder = getattr(cfg.policy.draft, "mask_token_id", None) if cfg is not None else None
    rows = range(max(policy.tokenizer.get_vocab().values(), default=-1) + 1, policy.vocab_size)
    return {*rows, *wanted, *([] if placeholder is None else [placeholder])}


def run_build(options: argparse.Namespace) -> int:
    """Choose the ids and write them."""
    cfg = recipe_of(options)
    policy = policy_of(options, cfg)
    counted = count(options, cfg, policy)
    kept, banned = kept_ids(policy, options.keep), banned_ids(policy, cfg, options.mask_token_id)
    lists: dict[str, Any] = {"vocab_size": policy.vocab_size, "always": kept, "never": banned}
    size = options.size
    if size is None and cfg is not None:
        size = cfg.policy.draft.draft_vocab_size
    if size is None:
        raise ConfigError("--size: got nothing, and no recipe sets policy.draft.draft_vocab_size. Set it, e.g. 32000.")
    try:
        vocab = select_vocab(counted.counts, draft_vocab_size=size, min_coverage=options.min_coverage, **lists)
        order = selection_order(counted.counts, **lists)
        shares = coverage_by_size(counted.counts, order, sorted({*SIZES, size, len(order)}))
        coverage = coverage_of(counted.counts, vocab.ids)
    except VocabMapError as err:
        raise ConfigError(
            f"--size: got {size}, and {err} ({counted.source}). Choose another size, count more tokens, or lower "
            "--min-coverage."
        ) from err
    total = sum(counted.counts.values())
    print(f"counted {total} tokens, {len(counted.counts)} different ones, in {counted.source}")
    for number, reason in sorted(kept.items()):
        print(f"kept {number}: {reason}")
    print_table(shares, chosen=size)
    write_vocab_file(
        options.out,
        VocabFile(
            vocab=vocab,
            tokenizer=policy.fingerprint,
            always=tuple(sorted(kept)),
            counted_tokens=total,
            coverage=coverage,
            coverage_by_size=shares,
            source=counted.source,
        ),
    )
    unused = sum(not counted.counts.get(i) for i in vocab.ids)
    print(f"{options.out}: {size} of {policy.vocab_size} ids, {unused} of them never counted, coverage {coverage:.4f}")
    return 0


def run_coverage(options: argparse.Namespace) -> int:
    """Print shares: of a file as it was made, or of the tokens of another source."""
    file = None if options.file is None else read_vocab_file(options.file, key="file")
    if options.data is None and options.rollouts is None:
        if file is None:
            raise ConfigError("coverage: got neither a file nor --data nor --rollouts. Give what to count or to show.")
        print(f"{options.file}: made from {file.counted_tokens} tokens ({file.source})")
        print_table(file.coverage_by_size, chosen=len(file.vocab.ids))
        return 0
    cfg = recipe_of(options)
    policy = policy_of(options, cfg)
    if file is not None:
        check_owner(file, vocab_size=policy.vocab_size, tokenizer_dir=policy.tokenizer_dir, key=str(options.file))
    counted = count(options, cfg, policy)
    kept, banned = kept_ids(policy, options.keep), banned_ids(policy, cfg, options.mask_token_id)
    try:
        order = selection_order(counted.counts, vocab_size=policy.vocab_size, always=kept, never=banned)
        shares = coverage_by_size(counted.counts, order, sorted({*SIZES, len(order)}))
        own = None if file is None else coverage_of(counted.counts, file.vocab.ids)
    except VocabMapError as err:
        raise ConfigError(f"{counted.source}: {err}. Count another source.") from err
    print(f"counted {sum(counted.counts.values())} tokens, {len(counted.counts)} different ones, in {counted.source}")
    print_table(shares, chosen=None)
    if own is not None and file is not None:
        print(f"{options.file}: {len(file.vocab.ids)} ids, coverage {own:.4f}; {file.coverage:.4f} when it was made")
    return 0


def print_table(shares: Mapping[int, float], *, chosen: int | None) -> None:
    """Print the share of the counted tokens per number of ids."""
    print("     ids  coverage")
    for size, share in sorted(shares.items()):
        print(f"{size:8d}  {share:.4f}{' <-' if size == chosen else ''}")


def run_check(options: argparse.Namespace) -> int:
    """List everything that is wrong with a file or a directory."""
    check = directory_problems if options.path.is_dir() else file_problems
    problems, notes = check(options)
    for line in problems:
        print(f"{options.path}: {line}")
    for line in notes:
        print(f"{options.path}: note: {line}")
    if not problems:
        print(f"{options.path}: nothing wrong")
    return EXIT_PROBLEMS if problems else 0


def file_problems(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """What is wrong with a vocabulary file, and what is worth knowing about it."""
    path = options.path
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file or directory. Correct the path.")
    raw = read_json_object(path, max_bytes=MAX_BYTES)
    ids, size, total = raw.get("ids"), raw.get("draft_vocab_size"), raw.get("vocab_size")
    if (
        raw.get("format") != FORMAT
        or not isinstance(size, int)
        or not isinstance(total, int)
        or not isinstance(ids, list)
    ):
        raise ConfigError(f"{path}: is no vocabulary file; must have format {FORMAT!r}, sizes and ids. Name another.")
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        return ["ids are not integers throughout"], []
    problems = table_problems([v - i for i, v in enumerate(ids)], vocab_size=total, draft_vocab_size=size)
    if ids != sorted(ids):
        problems.append("ids are not ascending")
    if problems:
        return [line.replace("d2t has", "ids has") for line in problems], []
    file = read_vocab_file(path, key="file")
    if options.tokenizer is not None:
        check_owner(file, vocab_size=total, tokenizer_dir=options.tokenizer, key=str(path))
    return [], [f"{size} of {total} ids, coverage {file.coverage:.4f} of {file.counted_tokens} tokens ({file.source})"]


def directory_problems(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """What is wrong with the vocabulary of a draft directory, and what is worth knowing about it."""
    from nemo_rl.models.automodel.draft.adapters.names import normalize_names
    from nemo_rl.models.automodel.draft.architecture import HEAD
    from nemo_rl.models.automodel.draft.registry import adapter_of, algorithm_of
    from nemo_rl.models.automodel.draft.weight_files import find_weight_files, member, read_integers

    directory = options.path
    raw = read_json_object(member(directory, "config.json"))
    algo = algorithm_of(raw) if options.algo is None else options.algo
    fields = adapter_of(algo).read_config(raw).fields
    total, size = fields["vocab_size"], fields["draft_vocab_size"]
    files = find_weight_files(directory)
    if files.pickle is not None:
        raise ConfigError(f"{files.pickle}: is a pickle file, which is not read here. Convert the draft first.")
    names = normalize_names(files.tensors).canonical
    stored = {name: files.tensors[names[name]] for name in ("d2t", "t2d", HEAD) if name in names}
    tables = {name: read_integers(stored[name]) for name in ("d2t", "t2d") if name in stored}
    problems = []
    notes = [f"{size} of {total} ids"]
    if HEAD in stored and stored[HEAD].shape[:1] != (size,):
        problems.append(f"{HEAD} has {stored[HEAD].shape[0]} rows, draft_vocab_size is {size}")
    if "d2t" in tables:
        problems += table_problems(tables["d2t"], vocab_size=total, draft_vocab_size=size, t2d=tables.get("t2d"))
        ids = [i + offset for i, offset in enumerate(tables["d2t"])]
        if size == total and any(tables["d2t"]):
            problems.append("every id is proposed, and d2t is not all zeros (it holds offsets)")
        if "t2d" not in tables:
            notes.append("there is no t2d; it is rebuilt from d2t")
        if ids != sorted(ids):
            notes.append("the ids are not ascending, which is allowed")
    elif size < total:
        problems.append(f"{size} of {total} ids are proposed, and there is no d2t that says which")
    return problems, notes


def recipe_of(options: argparse.Namespace) -> MasterConfig | None:
    """Load the recipe of `--data` with its overrides."""
    if options.data is None:
        if options.overrides:
            raise ConfigError(f"{options.overrides[0]}: settings need a recipe to change. Give --data.")
        return None
    from nemo_rl.utils.config import build_master_config, load_config
    from nemo_rl.utils.preflight_files import is_offline_run

    cfg = build_master_config(load_config(options.data, options.overrides))
    if is_offline_run(cfg):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return cfg


def id_list(text: str) -> list[int]:
    """Parse ids with commas between them."""
    return [int(part) for part in text.split(",")]


def add_source(command: argparse.ArgumentParser, *, is_required: bool) -> None:
    """Add what `build` and `coverage` share."""
    command.add_argument("--data", type=Path, metavar="RECIPE", help="recipe: names policy, tokenizer, data and draft")
    command.add_argument("--rollouts", type=Path, metavar="DIR", help="count recorded rollouts, not the recipe's data")
    command.add_argument("--policy", metavar="DIR", help="policy and tokenizer, when there is no recipe or another one")
    command.add_argument("--field", help="field of the data's rows to count; default: the expected answer")
    command.add_argument("--max-samples", type=int, metavar="N", help="count the first N rows of the data only")
    command.add_argument("--keep", type=id_list, default=[], metavar="ID,ID", help="ids that must be in")
    command.add_argument(
        "--mask-token-id", type=id_list, default=[], metavar="ID,ID", help="placeholders, never proposed"
    )
    command.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the recipe to change")
    command.set_defaults(is_source_required=is_required)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")
    build = commands.add_parser("build", help="count tokens and write the most frequent ids to a file")
    build.add_argument("--size", type=int, metavar="D", help="ids; default: the recipe's policy.draft.draft_vocab_size")
    build.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write")
    build.add_argument("--min-coverage", type=float, default=0.95, help="refuse to cover less (%(default)s)")
    add_source(build, is_required=True)
    build.set_defaults(run=run_build)
    coverage = commands.add_parser("coverage", help="share of the tokens that a file, or a size, holds")
    coverage.add_argument("--file", type=Path, help="vocabulary file; alone: the shares it was made with")
    add_source(coverage, is_required=False)
    coverage.set_defaults(run=run_coverage)
    check = commands.add_parser("check", help="list everything that is wrong with a vocabulary")
    check.add_argument("path", type=Path, help="vocabulary file, or directory of a draft")
    check.add_argument("--algo", help="algorithm of the draft; default: what its config.json says")
    check.add_argument("--tokenizer", type=Path, metavar="DIR", help="the file must be of this tokenizer")
    check.set_defaults(run=run_check)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Command line without the program's name; None takes the process's.

    Returns:
        Exit status: 0, 1 when `check` finds something or a file is damaged, 2 for input that cannot be used.
    """
    options = parse_arguments(arguments)
    try:
        if getattr(options, "is_source_required", False) and options.data is None and options.rollouts is None:
            raise ConfigError("--data: got nothing, and no --rollouts either. Give one of them: what to count.")
        return options.run(options)
    except NemoRLError as err:
        sys.stderr.write(f"error: {err}\n")
        return err.exit_code


if __name__ == "__main__":
    sys.exit(main())
