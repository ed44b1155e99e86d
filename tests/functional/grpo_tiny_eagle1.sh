#!/usr/bin/env bash
# The eagle1 recipe, shortened: the draft learns from nothing and the engine accepts its tokens.
# Its deeper tokens come from a draft trained one step ahead only: it needs longer.
NUM_STEPS=20
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run_recipe grpo-tiny-qwen3-1n0g-automodel-eagle1 policy.draft.train_global_batch_size=8 "$@"
check_draft
