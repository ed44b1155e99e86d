"""Warm start of the tiny policy on mixed-quality demonstrations of one reasoning-gym task.

A share of the demonstrations works the answer out, the rest guesses. The policy that imitates both shows its work in
that share of its samples and is right nearly only there: a start from which group-relative policy gradients learn to do
the work within twenty steps. Demonstrations that are all good leave nothing to learn, a half-trained policy only noise.

Shape symbols: R packed rows, S positions of a row, N supervised positions, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemo_rl.data.tiny_policy import RECORD_FILE, TinyPolicySettings, build_tiny_tokenizer, tiny_qwen3_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

DEMONSTRATION_SEED = 2_000_000
"""reasoning-gym draws question i of a seed from (seed + i): far from the seeds of the demo recipe's prompts."""
EVALUATION_SEED = 1_000_000
NUM_QUESTIONS = 20_000
ROW_TOKENS = 64
"""Positions of a packed row."""
MAX_GRAD_NORM = 1.0
MAX_NEW_TOKENS = 48
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class Demonstration:
    """One prompt and the answer to imitate, as token ids; the answer ends with the end-of-sequence token."""

    prompt_ids: list[int]
    response_ids: list[int]


@dataclass(frozen=True)
class PackedBatch:
    """Several demonstrations per row.

    Attributes:
        input_ids: int64 [R, S], padding where a row is not full.
        position_ids: int64 [R, S], from 0 in every demonstration.
        attention_mask: bool [R, 1, S, S], True = may attend; causal and inside one demonstration.
        supervised: int64 [N], flat positions of [R, S] whose *next* token belongs to a response.
        labels: int64 [N], that next token.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    supervised: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Evaluation:
    """How well a policy answers held-out questions."""

    sampled_reward: float
    greedy_reward: float
    worked_fraction: float
    """Share of the samples at temperature 1 that show work."""
    num_prompts: int


def spelling_response(word: str, answer: str, *, works: bool, rng: random.Random) -> str:
    """Write one demonstration of `spell_backward`.

    Args:
        word: the word to spell backward.
        answer: the right answer.
        works: number the letters first and then answer right, or answer at once with random letters.
        rng: draws the guess.

    Returns:
        The response text.
    """
    if works:
        letters = " ".join(f"{i}{letter}" for i, letter in enumerate(word, start=1))
        return f"<think>{letters}</think><answer>{answer}</answer>"
    return f"<answer>{''.join(rng.choice(LETTERS) for _ in answer)}</answer>"


def spelling_questions(settings: TinyPolicySettings, *, size: int, seed: int) -> Any:
    """Build the reasoning-gym data set that the settings describe."""
    import reasoning_gym  # two seconds of imports, and only training needs it

    return reasoning_gym.create_dataset(
        "spell_backward",
        size=size,
        seed=seed,
        min_word_len=settings.min_word_len,
        max_word_len=settings.max_word_len,
    )


def prompt_ids_of(questions: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Render questions with the chat template and tokenize them."""
    conversations = [[{"role": "user", "content": question}] for question in questions]
    texts = tokenizer.apply_chat_template(conversations, add_generation_prompt=True, tokenize=False)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def build_demonstrations(settings: TinyPolicySettings, tokenizer: PreTrainedTokenizerFast) -> list[Demonstration]:
    """Write the demonstrations: a share `settings.cot` of them worked, the rest guessed."""
    size = min(NUM_QUESTIONS, settings.steps * settings.batch_size)
    questions = spelling_questions(settings, size=size, seed=DEMONSTRATION_SEED + settings.seed * NUM_QUESTIONS)
    entries = [questions[i] for i in range(size)]
    prompts = prompt_ids_of([entry["question"] for entry in entries], tokenizer)
    responses = []
    for i, entry in enumerate(entries):
        rng = random.Random(f"{settings.seed}:{i}")
        works = rng.random() < settings.cot
        responses.append(spelling_response(entry["metadata"]["word"], entry["answer"], works=works, rng=rng))
    answers = tokenizer(responses, add_special_tokens=False)["input_ids"]
    return [Demonstration(p, [*a, tokenizer.eos_token_id]) for p, a in zip(prompts, answers, strict=True)]


def pack_demonstrations(batch: Sequence[Demonstration], *, pad_token_id: int, row_tokens: int) -> PackedBatch:
    """Pack demonstrations into as few rows as first-fit-decreasing finds.

    Args:
        batch: each at most `row_tokens` long.
        pad_token_id: fills the rows.
        row_tokens: positions of a row.

    Returns:
        The packed batch; every demonstration is in exactly one row and attends to itself only.
    """
    rows: list[list[Demonstration]] = []
    free: list[int] = []
    for item in sorted(batch, key=lambda d: len(d.prompt_ids) + len(d.response_ids), reverse=True):
        length = len(item.prompt_ids) + len(item.response_ids)
        if length > row_tokens:
            raise ValueError(f"a demonstration has {length} tokens; a row holds {row_tokens}")
        row = next((r for r, room in enumerate(free) if room >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(row_tokens)
        rows[row].append(item)
        free[row] -= length
    input_ids = torch.full((len(rows), row_tokens), pad_token_id, dtype=torch.int64)
    position_ids = torch.zeros_like(input_ids)
    documents = torch.full_like(input_ids, -1)
    supervised: list[int] = []
    labels: list[int] = []
    for r, row in enumerate(rows):
        start = 0
        for d, item in enumerate(row):
            ids = [*item.prompt_ids, *item.response_ids]
            end = start + len(ids)
            input_ids[r, start:end] = torch.tensor(ids)
            position_ids[r, start:end] = torch.arange(len(ids))
            documents[r, start:end] = d
            first = r * row_tokens + start + len(item.prompt_ids) - 1
            supervised += range(first, first + len(item.response_ids))
            labels += item.response_ids
            start = end
    causal = torch.ones(row_tokens, row_tokens, dtype=torch.bool).tril()
    mask = (documents[:, None, :, None] == documents[:, None, None, :]) & causal
    return PackedBatch(input_ids, position_ids, mask, torch.tensor(supervised), torch.tensor(labels))


def response_loss(model: Qwen3ForCausalLM, batch: PackedBatch) -> Tensor:
    """Mean cross-entropy of the response tokens; no logits are computed for other positions.

    Returns:
        fp32 scalar.
    """
    hidden_RSD = model.model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        use_cache=False,
    ).last_hidden_state
    logits_NV = model.lm_head(hidden_RSD.flatten(0, 1)[batch.supervised])
    return torch.nn.functional.cross_entropy(logits_NV.float(), batch.labels)


def learning_rate(settings: TinyPolicySettings, step: int) -> float:
    """Linear warm-up, then a cosine from the peak to a tenth of it."""
    warm = min(1.0, (step + 1) / settings.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * step / settings.steps))
    return settings.learning_rate * warm * (0.1 + 0.9 * cosine)


def initial_model(settings: TinyPolicySettings, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Build the untrained policy: normal weights from a generator of its own, norms at one."""
    from transformers import Qwen3ForCausalLM  # torch and the modelling code: only where a model is really made

    config = tiny_qwen3_config(
        tokenizer,
        hidden=settings.hidden,
        layers=settings.layers,
        heads=settings.heads,
        kv=settings.kv,
        head_dim=settings.head_dim,
        intermediate=settings.intermediate,
        tie=False,
    )
    with torch.random.fork_rng(devices=[]):  # its constructor draws weights, replaced below, from the global generator
        model = Qwen3ForCausalLM(config).float()
    generator = torch.Generator().manual_seed(settings.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, config.initializer_range, generator=generator)
    return model


def train_tiny_policy(
    settings: TinyPolicySettings,
    tokenizer: PreTrainedTokenizerFast,
    *,
    on_step: Callable[[int, float], None],
) -> Qwen3ForCausalLM:
    """Train from scratch on the demonstrations.

    Args:
        settings: model size, data and schedule.
        tokenizer: from `build_tiny_tokenizer`.
        on_step: called after every step with its 1-based number and its loss.

    Returns:
        The trained model, in evaluation mode. The same settings and thread count give the same weights.
    """
    demonstrations = build_demonstrations(settings, tokenizer)
    model = initial_model(settings, tokenizer)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.01, betas=(0.9, 0.98), fused=True)
    draws = random.Random(settings.seed)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        batch = draws.sample(demonstrations, settings.batch_size)
        loss = response_loss(
            model, pack_demonstrations(batch, pad_token_id=tokenizer.pad_token_id, row_tokens=ROW_TOKENS)
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        on_step(step + 1, loss.item())
    return model.eval()


@torch.no_grad()
def sample_responses(
    model: Qwen3ForCausalLM,
    prompts: Sequence[list[int]],
    *,
    eos_token_id: int,
    pad_token_id: int,
    max_new_tokens: int,
    generator: torch.Generator | None,
) -> list[list[int]]:
    """Complete prompts together, with a key/value cache.

    Args:
        model: the policy.
        prompts: token ids, padded on the left to a common length.
        eos_token_id: ends a response and is not returned.
        pad_token_id: fills the left side and finished rows.
        max_new_tokens: length limit.
        generator: draws from the full distribution at temperature 1; None takes the most likely token.

    Returns:
        Response token ids per prompt.
    """
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad_token_id, dtype=torch.int64)
    mask = torch.zeros((len(prompts), width + max_new_tokens), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) : width] = 1
    mask[:, width:] = 1
    cache, step_ids, columns = None, ids, []
    finished = torch.zeros(len(prompts), dtype=torch.bool)
    for step in range(max_new_tokens):
        end = width + step
        positions = (mask[:, :end].cumsum(-1) - 1).clamp(min=0)[:, -step_ids.shape[1] :]
        output = model(
            input_ids=step_ids,
            attention_mask=mask[:, :end],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, logits_BV = output.past_key_values, output.logits[:, -1].float()
        if generator is None:
            token = logits_BV.argmax(-1)
        else:
            token = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)[:, 0]
        finished |= token == eos_token_id
        token = token.masked_fill(finished, pad_token_id)
        columns.append(token)
        if bool(finished.all()):
            break
        step_ids = token[:, None]
    rows = torch.stack(columns, dim=1).tolist()
    return [row[: row.index(pad_token_id)] if pad_token_id in row else row for row in rows]


def evaluate_tiny_policy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: TinyPolicySettings, *, num_prompts: int
) -> Evaluation:
    """Score held-out questions with the task's own scorer, sampled at temperature 1 and greedily."""
    questions = spelling_questions(settings, size=num_prompts, seed=EVALUATION_SEED)
    entries = [questions[i] for i in range(num_prompts)]
    prompts = prompt_ids_of([entry["question"] for entry in entries], tokenizer)

    def respond(generator: torch.Generator | None) -> list[str]:
        rows = sample_responses(
            model,
            prompts,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            max_new_tokens=MAX_NEW_TOKENS,
            generator=generator,
        )
        return tokenizer.batch_decode(rows)

    def reward(texts: list[str]) -> float:
        total = 0.0
        for text, entry in zip(texts, entries, strict=True):
            found = ANSWER.findall(text)
            total += questions.score_answer(found[-1].strip(), entry) if found else 0.0
        return total / num_prompts

    sampled = respond(torch.Generator().manual_seed(settings.seed))
    return Evaluation(
        sampled_reward=reward(sampled),
        greedy_reward=reward(respond(None)),
        worked_fraction=sum("<think>" in text for text in sampled) / num_prompts,
        num_prompts=num_prompts,
    )


def build_tiny_policy(
    directory: Path,
    settings: TinyPolicySettings,
    *,
    threads: int,
    num_prompts: int,
    on_step: Callable[[int, float], None],
) -> dict[str, Any]:
    """Train, evaluate and write a policy directory; a directory of that name is replaced only when all is written.

    Args:
        directory: the policy's directory; its parent must exist.
        settings: model size, data and schedule.
        threads: CPU threads; the weights differ in the last bits between thread counts.
        num_prompts: held-out questions of the evaluation.
        on_step: called after every step with its 1-based number and its loss.

    Returns:
        The record that is also written to `tiny_policy.json`.
    """
    started = time.monotonic()
    torch.set_num_threads(threads)
    tokenizer = build_tiny_tokenizer()
    model = train_tiny_policy(settings, tokenizer, on_step=on_step)
    evaluation = evaluate_tiny_policy(model, tokenizer, settings, num_prompts=num_prompts)
    record = {
        "fingerprint": settings.fingerprint(),
        "settings": dataclasses.asdict(settings),
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "evaluation": dataclasses.asdict(evaluation),
        "seconds": round(time.monotonic() - started, 1),
        "threads": threads,
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers", "reasoning_gym")},
    }
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        built = staging / "new"
        model.save_pretrained(built)
        tokenizer.save_pretrained(built)
        (built / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if directory.exists():
            directory.rename(staging / "old")
        built.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return record
