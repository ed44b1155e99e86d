#!/usr/bin/env bash
# The eagle3 recipe, shortened: the draft learns from nothing and the engine accepts its tokens.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run_recipe grpo-tiny-qwen3-1n0g-automodel-eagle3 policy.draft.train_global_batch_size=8 "$@"
check_draft
