#!/usr/bin/env bash
# The baseline without speculation: generation and training agree, the reward rises.
source "$(dirname "${BASH_SOURCE[0]}")/common.env"

# ===== BEGIN CONFIG =====
NUM_NODES=1
GPUS_PER_NODE=8
STEPS_PER_RUN=30
MAX_STEPS=30
NUM_RUNS=$(((MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN))
NUM_MINUTES=90
# ===== END CONFIG =====

exit_if_max_steps_reached
run_recipe "$@"
check_when_finished \
    'min(data["refit/verified"]) == 1' \
    'last(data["refit/version"]) == 30' \
    'max(data["train/num_skipped_updates"]) == 0' \
    'mean(data["train/token_mult_prob_error"]) < 1.05' \
    'mean(data["train/reward"], -10, 0) > 0.5'
