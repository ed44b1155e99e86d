#!/usr/bin/env bash
# The peagle recipe, shortened: the draft learns from nothing and the engine accepts its tokens.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run_recipe grpo-tiny-qwen3-1n0g-automodel-peagle policy.draft.train_global_batch_size=8 "$@"
check_draft
