"""Seconds of one refit, from the trainer's parameters to verified engine weights: policy alone, and with the draft.

.venv/bin/python tools/bench/refit.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench import in_process


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default=in_process.DEMO)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the recipe")
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    cfg, checked = in_process.load(args.config, args.set)
    draft = in_process.draft_of(checked)

    from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorker

    policies = {name: in_process.make_policy(cfg, checked, with_draft=name == "with") for name in ("without", "with")}
    engines = {}
    with tempfile.TemporaryDirectory() as directory:
        policies["with"].export_draft(directory)
        for name, policy in policies.items():
            engine = VllmGenerationWorker(
                cfg.policy.generation,
                model_dir=checked.model_dir,
                tokenizer_dir=cfg.policy.tokenizer.name,
                device=checked.device,
                seed=0,
            )
            has_draft = name == "with"
            engine.build(
                speculative_config=draft.speculative_config(model_dir=directory) if has_draft else None,
                trained_draft_tensors=tuple(policy.refit_manifest().draft),
                draft_extension=draft.serving_extension if has_draft else None,
            )
            engines[name] = engine
        gather: dict[str, list[float]] = {name: [] for name in policies}
        apply: dict[str, list[float]] = {name: [] for name in policies}
        for version in range(args.turns + 1):
            for name, policy in policies.items():
                start = time.perf_counter()
                payload = policy.gather_weights(version)
                gathered = time.perf_counter()
                assert payload is not None, "rank 0 gathers"
                report = engines[name].update_weights(payload)
                applied = time.perf_counter()
                if report.num_checked != len(payload.manifest.wire_entries()):
                    sys.exit(f"the engine could not verify every tensor: {report.unchecked}")
                if version:
                    gather[name].append(gathered - start)
                    apply[name].append(applied - gathered)
        for name, policy in policies.items():
            entries = policy.refit_manifest().wire_entries()
            size = sum(_numel(info.shape) for info in entries.values())
            print(
                f"{name:7} draft: {len(entries):3} tensors, {size / 1e6:.2f} M values; gather "
                f"{statistics.median(gather[name]) * 1e3:7.1f} ms, check, apply and verify "
                f"{statistics.median(apply[name]) * 1e3:7.1f} ms (median of {args.turns})"
            )
    total = {name: statistics.median(g + a for g, a in zip(gather[name], apply[name], strict=True)) for name in gather}
    print(f"ratio (with / without draft) {total['with'] / total['without']:.2f}x")


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


if __name__ == "__main__":
    main()
