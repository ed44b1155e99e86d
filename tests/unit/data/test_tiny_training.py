from __future__ import annotations

import dataclasses
import random
import re

import pytest
import torch

from nemo_rl.data.tiny_policy import TinyPolicySettings, build_tiny_tokenizer
from nemo_rl.data.tiny_training import (
    Demonstration,
    build_demonstrations,
    evaluate_tiny_policy,
    initial_model,
    learning_rate,
    pack_demonstrations,
    response_loss,
    sample_responses,
    spelling_questions,
    train_tiny_policy,
)

SMALL = TinyPolicySettings(layers=2, steps=3, batch_size=16)
ROW = 64


@pytest.fixture(scope="module")
def tokenizer():
    return build_tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    model = initial_model(SMALL, tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():  # large enough for attention to matter
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return model


@pytest.fixture(scope="module")
def demonstrations(tokenizer) -> list[Demonstration]:
    return build_demonstrations(SMALL, tokenizer)


def texts(demonstrations: list[Demonstration], tokenizer) -> list[str]:
    return [tokenizer.decode(d.response_ids) for d in demonstrations]


def test_worked_demonstrations_are_right_by_the_tasks_own_rule(tokenizer) -> None:
    settings = dataclasses.replace(SMALL, cot=1.0)
    questions = spelling_questions(settings, size=48, seed=2_000_000)
    for i, text in enumerate(texts(build_demonstrations(settings, tokenizer), tokenizer)):
        match = re.fullmatch(r"<think>(.*)</think><answer>(.*)</answer><\|im_end\|>", text)
        assert match is not None
        assert questions.score_answer(match.group(2), questions[i]) == 1.0
        assert match.group(1) == " ".join(f"{n}{c}" for n, c in enumerate(questions[i]["metadata"]["word"], start=1))


def test_guessed_demonstrations_show_no_work_and_are_mostly_wrong(tokenizer) -> None:
    settings = dataclasses.replace(SMALL, cot=0.0)
    questions = spelling_questions(settings, size=48, seed=2_000_000)
    guesses = texts(build_demonstrations(settings, tokenizer), tokenizer)
    answers = [re.fullmatch(r"<answer>([a-z]+)</answer><\|im_end\|>", text).group(1) for text in guesses]
    assert [len(a) for a in answers] == [len(questions[i]["answer"]) for i in range(48)]
    assert sum(questions.score_answer(a, questions[i]) for i, a in enumerate(answers)) / 48 < 0.15


def test_share_of_worked_demonstrations_follows_the_setting(tokenizer) -> None:
    settings = dataclasses.replace(SMALL, steps=60, cot=0.4)
    written = texts(build_demonstrations(settings, tokenizer), tokenizer)
    assert sum("<think>" in text for text in written) / len(written) == pytest.approx(0.4, abs=0.05)


def test_each_demonstration_is_packed_once_and_alone(demonstrations) -> None:
    packed = pack_demonstrations(demonstrations, pad_token_id=256, row_tokens=ROW)
    lengths = sorted(len(d.prompt_ids) + len(d.response_ids) for d in demonstrations)
    starts = (packed.position_ids == 0) & (packed.input_ids == 257)  # every prompt begins with <|im_start|>
    assert int(starts.sum()) == len(demonstrations)
    found = []
    for row, mask in zip(packed.input_ids, packed.attention_mask[:, 0], strict=True):
        for start in ((row == 257) & mask.diagonal() & (mask.sum(-1) == 1)).nonzero().flatten().tolist():
            found.append(int(mask[:, start].sum()))  # positions that see the first token of the document
    assert sorted(found) == lengths
    assert packed.labels.tolist().count(258) == len(demonstrations)
    assert packed.input_ids.shape[0] < len(demonstrations)


def test_packed_loss_and_gradients_equal_one_by_one(model, demonstrations) -> None:
    batch = demonstrations[:10]
    count = sum(len(d.response_ids) for d in batch)
    model.zero_grad()
    total = 0.0
    for d in batch:  # transformers' own shifted loss on the bare sequence
        ids = torch.tensor([[*d.prompt_ids, *d.response_ids]])
        labels = torch.tensor([[-100] * len(d.prompt_ids) + d.response_ids])
        loss = model(input_ids=ids, labels=labels).loss * (len(d.response_ids) / count)
        loss.backward()
        total += loss.item()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss = response_loss(model, pack_demonstrations(batch, pad_token_id=256, row_tokens=ROW))
    loss.backward()
    assert loss.item() == pytest.approx(total, rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_demonstration_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="has 9 tokens; a row holds 8"):
        pack_demonstrations([Demonstration([1] * 5, [2] * 4)], pad_token_id=0, row_tokens=8)


def test_longest_possible_demonstration_fits_a_row(tokenizer) -> None:
    settings = dataclasses.replace(SMALL, steps=1, batch_size=64, cot=1.0, min_word_len=SMALL.max_word_len)
    written = build_demonstrations(settings, tokenizer)
    assert max(len(d.prompt_ids) + len(d.response_ids) for d in written) <= ROW


def test_greedy_sampling_equals_decoding_without_cache_or_padding(model, demonstrations) -> None:
    prompts = [
        d.prompt_ids for d in sorted(demonstrations, key=lambda d: len(d.prompt_ids))[:: len(demonstrations) // 5]
    ]
    assert len({len(p) for p in prompts}) > 1
    rows = sample_responses(model, prompts, eos_token_id=-1, pad_token_id=319, max_new_tokens=12, generator=None)
    for prompt, row in zip(prompts, rows, strict=True):
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(12):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert row == ids[len(prompt) :]


def test_sampling_stops_at_end_of_sequence(model, demonstrations) -> None:
    prompt = demonstrations[0].prompt_ids
    free = sample_responses(model, [prompt], eos_token_id=-1, pad_token_id=319, max_new_tokens=6, generator=None)[0]
    stopped = sample_responses(
        model, [prompt], eos_token_id=free[3], pad_token_id=319, max_new_tokens=6, generator=None
    )[0]
    assert stopped == free[: free.index(free[3])]


def test_sampled_tokens_follow_the_models_distribution(model, demonstrations) -> None:
    prompt = demonstrations[0].prompt_ids
    with torch.no_grad():
        probabilities = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    rows = sample_responses(
        model,
        [prompt] * 4000,
        eos_token_id=-1,
        pad_token_id=319,
        max_new_tokens=1,
        generator=torch.Generator().manual_seed(0),
    )
    counts = torch.bincount(torch.tensor([row[0] if row else 319 for row in rows]), minlength=320)
    expected = 4000 * probabilities
    likely = expected >= 5
    chi_square = float(((counts - expected) ** 2 / expected)[likely].sum())
    degrees = int(likely.sum())
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5  # four standard deviations
    assert degrees > 5


def test_training_is_deterministic_for_a_seed_and_lowers_the_loss(tokenizer) -> None:
    settings = dataclasses.replace(SMALL, steps=6, warmup_steps=2)
    losses: list[list[float]] = [[], [], []]
    first, again, other = (
        train_tiny_policy(
            dataclasses.replace(settings, seed=seed), tokenizer, on_step=lambda _, loss, i=i: losses[i].append(loss)
        )
        for i, seed in enumerate((0, 0, 1))
    )
    assert losses[0] == losses[1] != losses[2]
    assert losses[0][-1] < losses[0][0] - 0.5
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name


def test_training_leaves_the_global_generators_alone(tokenizer) -> None:
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(1), random.random()
    torch.manual_seed(3)
    random.seed(3)
    model = train_tiny_policy(dataclasses.replace(SMALL, steps=1), tokenizer, on_step=lambda *_: None)
    evaluate_tiny_policy(model, tokenizer, SMALL, num_prompts=2)
    assert (torch.rand(1), random.random()) == expected


def test_learning_rate_warms_up_and_ends_at_a_tenth() -> None:
    settings = TinyPolicySettings(steps=400, warmup_steps=20, learning_rate=1.0)
    rates = [learning_rate(settings, step) for step in range(400)]
    assert rates[0] == pytest.approx(1 / 20)
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert rates[20:] == sorted(rates[20:], reverse=True)


def test_evaluation_of_an_untrained_policy_is_about_zero(model, tokenizer) -> None:
    result = evaluate_tiny_policy(model, tokenizer, SMALL, num_prompts=16)
    assert 0.0 <= result.sampled_reward < 0.05
    assert result.num_prompts == 16
