"""Train a speculative-decoding draft for a policy that stays as it is, with the configuration of a GRPO run.

python examples/run_draft.py --config examples/configs/recipes/llm/<recipe>.yaml draft_run.max_num_steps=100
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl import cli

DEFAULT_CONFIG = Path(__file__).resolve().parent / "configs" / "grpo_math_1B.yaml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Command line without the program's name; None takes the process's.

    Returns:
        Exit status, see `nemo_rl.cli.main`.
    """
    return cli.main(arguments, default_config=DEFAULT_CONFIG, command=cli.DRAFT)


if __name__ == "__main__":
    sys.exit(main())
