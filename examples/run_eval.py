"""Evaluate a checkpoint: pass@k, tokens per second and acceptance, with speculation and without.

python examples/run_eval.py --config examples/configs/recipes/llm/<recipe>.yaml \
    policy.model_name=results/<run>/step_30/policy_hf policy.draft.model_name=results/<run>/step_30/draft \
    grpo.max_val_samples=128 grpo.val_num_generations_per_prompt=8
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl import eval_cli

DEFAULT_CONFIG = Path(__file__).resolve().parent / "configs" / "grpo_math_1B.yaml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Command line without the program's name; None takes the process's.

    Returns:
        Exit status, see `nemo_rl.cli.main`.
    """
    return eval_cli.main(arguments, default_config=DEFAULT_CONFIG)


if __name__ == "__main__":
    sys.exit(main())
