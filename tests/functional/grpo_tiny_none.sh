#!/usr/bin/env bash
# The baseline without speculation: nothing is proposed, nothing about a draft is logged.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run_recipe grpo-tiny-qwen3-1n0g-automodel-none grpo.max_num_steps=2 "$@"
check \
    'len(data["train/reward"]) == 2' \
    'min(data["refit/verified"]) == 1' \
    'max(data["train/token_mult_prob_error"]) < 1.01'
! grep -E '"(vllm/spec_|train/draft_)' "$RUN_DIR/logs/metrics.jsonl"
