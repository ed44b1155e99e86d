"""Rollout tokens per second with and without speculation, by batch size, for the policy and draft of a checkpoint.

    .venv/bin/python tools/bench/rollout.py --config RECIPE --checkpoint results/.../step_N

The checkpoint must have been saved with `checkpointing.save_consolidated: true`. All engines live in this process,
sample the same prompts with the same seeds at the recipe's temperature, and take turns; figures are medians.
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
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--k", type=int, nargs="+", help="tokens proposed per step; default: the recipe's")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    checkpoint = Path(args.checkpoint)
    policy_dir, draft_dir = checkpoint / "policy_hf", checkpoint / "draft"
    cfg, checked = in_process.load(
        args.config, [f"policy.model_name={policy_dir}", f"policy.draft.model_name={draft_dir}"]
    )
    draft = in_process.draft_of(checked)

    from nemo_rl.data.datasets import build_datasets
    from nemo_rl.data.tokenizer import load_tokenizer
    from nemo_rl.experience.rollouts import pack_prompts
    from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorker

    tokenizer = load_tokenizer(cfg.policy.tokenizer)
    prompts, _ = build_datasets(
        cfg.data, cfg.env, tokenizer, max_input_len=cfg.data.max_input_seq_length, seed=cfg.grpo.seed
    )
    data = pack_prompts(
        [prompts[i] for i in range(args.num_prompts)],
        num_generations=1,
        pad_token_id=tokenizer.pad_token_id,
        seeds=list(range(args.num_prompts)),
    )

    def engine(k: int | None) -> VllmGenerationWorker:
        worker = VllmGenerationWorker(
            cfg.policy.generation,
            model_dir=str(policy_dir),
            tokenizer_dir=cfg.policy.tokenizer.name,
            device=checked.device,
            seed=0,
        )
        spec = draft.speculative_config(model_dir=str(draft_dir))
        assert spec is not None, "the recipe's draft is not served (policy.draft.serve: false)"
        worker.build(
            speculative_config=None if k is None else spec | {"num_speculative_tokens": k},
            draft_extension=None if k is None else draft.serving_extension,
        )
        return worker

    ks = args.k or [cfg.policy.generation.num_speculative_tokens]
    engines = {None: engine(None)} | {k: engine(k) for k in ks}
    print(f"policy {policy_dir}, draft {draft.describe()}")
    for size in args.batch_sizes:
        rates: dict[int | None, list[float]] = {k: [] for k in engines}
        before = {k: worker.spec_counters() for k, worker in engines.items()}
        for turn in range(args.turns + 1):
            for k, worker in engines.items():
                tokens, start = 0, time.perf_counter()
                for first in range(0, data.size, size):
                    tokens += int(worker.generate(data.slice(first, first + size))["generation_lengths"].sum())
                if turn:
                    rates[k].append(tokens / (time.perf_counter() - start))
        plain = statistics.median(rates[None])
        for k in ks:
            rate = statistics.median(rates[k])
            length = (engines[k].spec_counters() - before[k]).acceptance_length
            print(
                f"batch {size:3}  plain {plain:7.0f} tokens/s  K={k} {rate:7.0f} tokens/s  "
                f"acceptance {length:.2f} of {k + 1}  ratio {rate / plain:.2f}x"
            )


if __name__ == "__main__":
    main()
