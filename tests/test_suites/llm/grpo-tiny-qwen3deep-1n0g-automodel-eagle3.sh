#!/usr/bin/env bash
# The rollout benchmark on the CPU: a draft from scratch comes to pay for itself on a deep, narrow policy.
source "$(dirname "${BASH_SOURCE[0]}")/common.env"

# ===== BEGIN CONFIG =====
NUM_NODES=1
GPUS_PER_NODE=0
STEPS_PER_RUN=30
MAX_STEPS=30
NUM_RUNS=$(((MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN))
NUM_MINUTES=60
# ===== END CONFIG =====

exit_if_max_steps_reached
POLICY=$EXP_DIR/policy
[ -f "$POLICY/config.json" ] || "$PYTHON" "$ROOT/tools/make_tiny_policy.py" --out "$POLICY" --layers 16
run_recipe policy.model_name="$POLICY" "$@"
check_when_finished \
    'min(data["refit/verified"]) == 1' \
    'last(data["refit/version"]) == 30' \
    'max(data["train/num_skipped_updates"]) == 0' \
    'max(data["train/token_mult_prob_error"]) < 1.01' \
    'first(data["vllm/spec_acceptance_length"]) < 1.5' \
    'last(data["vllm/spec_acceptance_length"]) >= 3.0' \
    'last(data["performance/spec_speedup"]) > 1.3'
