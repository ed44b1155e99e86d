"""Train a policy with GRPO or DAPO, and a speculative-decoding draft beside it.

python examples/run_grpo.py --config examples/configs/recipes/llm/<recipe>.yaml grpo.max_num_steps=10
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
    return cli.main(arguments, default_config=DEFAULT_CONFIG)


if __name__ == "__main__":
    sys.exit(main())
