#!/usr/bin/env bash
# The eagle1 recipe, shortened: the draft learns from nothing and the engine accepts its tokens.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run_recipe grpo-tiny-qwen3-1n0g-automodel-eagle1 "$@"
check_draft
