#!/usr/bin/env bash
# A draft that is trained while the engine speculates without it.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run_recipe grpo-tiny-qwen3-1n0g-automodel-eagle3 grpo.max_num_steps=3 \
    policy.draft.serve=false policy.draft.train_every=2 policy.draft.warmup_steps=2 \
    ++policy.generation.vllm_kwargs.speculative_config.method=ngram \
    ++policy.generation.vllm_kwargs.speculative_config.prompt_lookup_min=2 "$@"
check \
    'len(data["train/reward"]) == 3' \
    'len(data["train/draft_loss"]) == 2' \
    'min(data["refit/verified"]) == 1' \
    'last(data["train/draft_loss"]) < first(data["train/draft_loss"])' \
    'last(data["train/draft_expected_acceptance_length"]) > 1' \
    'min(data["vllm/spec_acceptance_length"]) > 1'
! grep '"train/draft_acceptance_gap' "$RUN_DIR/logs/metrics.jsonl"
