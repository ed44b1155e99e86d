# Sourced by the scripts of this directory: one short run of a recipe on the tiny policy, and checks of what it logged.
#
#   TINY_POLICY   warm-started policy to start from; made (about two minutes) if it does not exist
#   RUN_DIR       where the run writes; a temporary directory by default
#   NUM_STEPS     of the run
#   PYTHON        interpreter with the program's environment
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
TINY_POLICY=${TINY_POLICY:-$ROOT/results/models/tiny-qwen3-64x4-spell}
RUN_DIR=${RUN_DIR:-$(mktemp -d)}
NUM_STEPS=${NUM_STEPS:-14}
export HF_HUB_OFFLINE=1

# run_recipe NAME [key=value...]: fewer samples and steps than the recipe, no checkpoints, no throughput probe.
run_recipe() {
    local name=$1
    shift
    [ -f "$TINY_POLICY/config.json" ] || "$PYTHON" "$ROOT/tools/make_tiny_policy.py" --out "$TINY_POLICY"
    "$PYTHON" "$ROOT/examples/run_grpo.py" \
        --config "$ROOT/examples/configs/recipes/llm/$name.yaml" \
        policy.model_name="$TINY_POLICY" \
        grpo.max_num_steps=$NUM_STEPS \
        grpo.num_prompts_per_step=16 \
        policy.train_global_batch_size=128 \
        grpo.val_period=0 grpo.val_at_start=false \
        checkpointing.enabled=false \
        policy.generation.throughput_probe.enabled=false \
        logger.log_dir="$RUN_DIR/logs" \
        "$@"
}

# check EXPRESSION...: over the metrics that the run logged.
check() {
    "$PYTHON" "$ROOT/tests/check_metrics.py" "$RUN_DIR/logs/metrics.jsonl" "$@"
}

# check_draft: what holds for every draft that is trained and served.
check_draft() {
    check \
        "len(data['train/reward']) == $NUM_STEPS" \
        'min(data["refit/verified"]) == 1' \
        "last(data['refit/version']) == $NUM_STEPS" \
        'max(data["train/num_skipped_updates"]) == 0' \
        'max(data["train/token_mult_prob_error"]) < 1.01' \
        'last(data["train/draft_loss"]) < first(data["train/draft_loss"])' \
        'first(data["vllm/spec_acceptance_length"]) < 1.5' \
        'last(data["vllm/spec_acceptance_length"]) >= 2.0' \
        "$@"
}
