#!/usr/bin/env bash
# The recipe of the rollout benchmark, hardly trained: sixteen layers, draft features of an early, a middle and a late one.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
POLICY=$RUN_DIR/policy
"$PYTHON" "$ROOT/tools/make_tiny_policy.py" --out "$POLICY" --layers 16 --steps 10
run_recipe grpo-tiny-qwen3deep-1n0g-automodel-eagle3 policy.model_name="$POLICY" \
    grpo.max_num_steps=2 grpo.num_prompts_per_step=4 policy.train_global_batch_size=32 \
    policy.generation.max_new_tokens=16 "$@"
check \
    'len(data["train/reward"]) == 2' \
    'min(data["refit/verified"]) == 1' \
    'max(data["train/num_skipped_updates"]) == 0' \
    'max(data["train/token_mult_prob_error"]) < 1.01' \
    'last(data["train/draft_loss"]) < first(data["train/draft_loss"])'
