#!/usr/bin/env bash
# The published draft keeps up with the policy: its acceptance does not fall.
source "$(dirname "${BASH_SOURCE[0]}")/common.env"

# ===== BEGIN CONFIG =====
NUM_NODES=1
GPUS_PER_NODE=8
STEPS_PER_RUN=30
MAX_STEPS=30
NUM_RUNS=$(((MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN))
NUM_MINUTES=120
# ===== END CONFIG =====

exit_if_max_steps_reached
run_recipe "$@"
check_when_finished \
    'min(data["refit/verified"]) == 1' \
    'last(data["refit/version"]) == 30' \
    'max(data["train/num_skipped_updates"]) == 0' \
    'mean(data["train/token_mult_prob_error"]) < 1.05' \
    'mean(data["train/reward"], -10, 0) > -0.5' \
    'mean(data["train/draft_loss"], -5, 0) < 1.05 * mean(data["train/draft_loss"], 1, 6)' \
    'mean(data["vllm/spec_acceptance_length"], -5, 0) >= 2.5' \
    'mean(data["vllm/spec_acceptance_length"], -5, 0) >= 0.95 * mean(data["vllm/spec_acceptance_length"], 1, 6)'
