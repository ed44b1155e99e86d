#!/usr/bin/env bash
# The baseline that looks its proposals up: counters, refits of the policy alone, and the probe of what it gains.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run_recipe grpo-tiny-qwen3-1n0g-automodel-ngram grpo.max_num_steps=2 \
    policy.generation.throughput_probe.enabled=true policy.generation.throughput_probe.repeats=1 "$@"
check \
    'len(data["train/reward"]) == 2' \
    'min(data["refit/verified"]) == 1' \
    'max(data["train/token_mult_prob_error"]) < 1.01' \
    'min(data["vllm/spec_acceptance_length"]) > 1' \
    'max(data["vllm/spec_acceptance_length"]) <= 4' \
    'min(data["vllm/spec_tokens_per_forward"]) > 1' \
    'last(data["performance/spec_speedup"]) > 0'
! grep '"train/draft_' "$RUN_DIR/logs/metrics.jsonl"
