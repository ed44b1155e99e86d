#!/usr/bin/env bash
# A draft that is trained while the engine speculates without it; then the same draft, served and not trained.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
run_recipe grpo-tiny-qwen3-1n0g-automodel-eagle3 grpo.max_num_steps=3 \
    checkpointing.enabled=true checkpointing.metric_name=null checkpointing.checkpoint_dir="$RUN_DIR/checkpoints" \
    policy.draft.serve=false policy.draft.train_every=2 policy.draft.warmup_steps=2 \
    ++policy.generation.vllm_kwargs.speculative_config.method=ngram \
    ++policy.generation.vllm_kwargs.speculative_config.prompt_lookup_min=2 "$@"
check \
    'len(data["train/reward"]) == 3' \
    'len(data["train/draft_loss"]) == 2' \
    'min(data["refit/verified"]) == 1' \
    'last(data["train/draft_loss"]) < first(data["train/draft_loss"])' \
    'last(data["train/draft_expected_acceptance_length"]) > 1.1' \
    'min(data["vllm/spec_acceptance_length"]) > 1'
if grep '"train/draft_acceptance_gap' "$RUN_DIR/logs/metrics.jsonl"; then exit 1; fi

TRAINED=$RUN_DIR/checkpoints/step_3/draft RUN_DIR=$RUN_DIR/static
run_recipe grpo-tiny-qwen3-1n0g-automodel-eagle3 grpo.max_num_steps=2 \
    policy.draft.static=true policy.draft.model_name="$TRAINED" \
    '~policy.draft.optimizer' '~policy.draft.train_global_batch_size' "$@"
check \
    'len(data["train/reward"]) == 2' \
    'min(data["refit/verified"]) == 1' \
    'min(data["vllm/spec_acceptance_length"]) > 1.1'
if grep '"train/draft_' "$RUN_DIR/logs/metrics.jsonl"; then exit 1; fi
