"""Share of the training step that the draft costs: the same policy and batch with and without it, in turns.

.venv/bin/python tools/bench/train_step.py
.venv/bin/python tools/bench/train_step.py --set policy.draft.ttt_steps=7 policy.draft.train_global_batch_size=null
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench import in_process


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default=in_process.DEMO)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the recipe")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    cfg, checked = in_process.load(args.config, args.set)
    draft = in_process.draft_of(checked)
    workers = {name: in_process.make_policy(cfg, checked, with_draft=name == "with") for name in ("without", "with")}

    from nemo_rl.algorithms.loss import ClippedPGLossFn

    batch = in_process.make_batch(
        cfg, vocab_size=int(checked.policy_config["vocab_size"]), width=cfg.policy.max_total_sequence_length
    )
    loss_fn = ClippedPGLossFn(cfg.loss_fn)
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for turn in range(args.turns + 1):
        for name, worker in workers.items():
            start = time.perf_counter()
            worker.train(batch, loss_fn, turn)
            if turn:  # the first turn warms up
                seconds[name].append(time.perf_counter() - start)
    without, with_draft = (statistics.median(seconds[name]) for name in ("without", "with"))
    tokens = int(batch["input_lengths"].sum())
    updates = cfg.policy.train_global_batch_size // cfg.policy.smallest_train_batch_size
    print(draft.describe())
    print(
        f"{batch.size} samples, {tokens} tokens, K = {draft.num_speculative_tokens}, {updates} draft update(s) per step"
    )
    print(f"policy alone {without:.3f} s, with draft {with_draft:.3f} s per step (median of {args.turns})")
    print(
        f"ratio (with / without) {with_draft / without:.2f}x; "
        f"the draft's share of the step {1 - without / with_draft:.0%}"
    )


if __name__ == "__main__":
    main()
