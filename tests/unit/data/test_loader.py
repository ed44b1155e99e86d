from __future__ import annotations

import itertools
import json

import pytest

from nemo_rl.data.datasets import PromptExample
from nemo_rl.data.loader import PromptLoader
from nemo_rl.errors import CheckpointError, ConfigError


def prompts(count: int) -> list[PromptExample]:
    return [PromptExample(i, [i], str(i), "math", {"ground_truth": ""}, False) for i in range(count)]


def make_loader(count: int = 11, batch_size: int = 3, *, shuffle: bool = True, seed: int = 5) -> PromptLoader:
    return PromptLoader(prompts(count), batch_size, shuffle=shuffle, seed=seed)


def indices(batch: list[PromptExample]) -> list[int]:
    return [example.index for example in batch]


def stream(loader: PromptLoader, num_epochs: int):
    for _ in range(num_epochs):
        for batch in loader:
            yield indices(batch)


def test_epoch_has_each_prompt_at_most_once_and_full_batches_only() -> None:
    loader = make_loader()
    batches = list(stream(loader, 1))
    seen = list(itertools.chain.from_iterable(batches))
    assert len(loader) == len(batches) == 3
    assert all(len(batch) == 3 for batch in batches)
    assert len(set(seen)) == 9
    assert set(seen) <= set(range(11))


def test_dataset_is_in_its_own_order() -> None:
    assert indices(list(make_loader().dataset)) == list(range(11))


def test_order_depends_on_epoch_and_seed_only() -> None:
    loader = make_loader()
    first, second = list(stream(loader, 1)), list(stream(loader, 1))
    assert first != second
    assert list(stream(make_loader(), 2)) == first + second
    assert list(stream(make_loader(seed=6), 1)) != first


def test_unshuffled_order_is_the_data_sets() -> None:
    assert list(stream(make_loader(shuffle=False), 2)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]] * 2


@pytest.mark.parametrize("consumed", range(8))
def test_resumed_loader_continues_after_any_number_of_batches(consumed: int) -> None:
    expected = list(stream(make_loader(), 4))
    loader = make_loader()
    for _ in itertools.islice(stream(loader, 4), consumed):
        pass
    resumed = make_loader()
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    # Where an epoch is just over, its (empty) rest is one iteration more.
    assert list(itertools.islice(stream(resumed, 5), 12 - consumed)) == expected[consumed:]


def test_state_saved_while_a_batch_is_in_use_is_after_it() -> None:
    loader = make_loader()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    after = indices(next(iterator))
    resumed = make_loader()
    resumed.load_state_dict(state)
    assert indices(next(iter(resumed))) == after


def test_finished_epochs_stay_finished_after_resume() -> None:
    loader = make_loader()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    resumed = make_loader()
    resumed.load_state_dict(loader.state_dict())
    assert resumed.epoch == 0
    assert list(resumed) == []
    assert resumed.epoch == 1


def test_resume_with_another_batch_size_continues_at_the_same_prompt() -> None:
    whole = make_loader(12, 1)
    order = [batch[0] for batch in stream(whole, 1)]
    loader = make_loader(12, 3)
    next(iter(loader))
    resumed = make_loader(12, 4)
    resumed.load_state_dict(loader.state_dict())
    assert list(stream(resumed, 1)) == [order[3:7], order[7:11]]


def test_batch_larger_than_data_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"grpo\.num_prompts_per_step: got 12; must be at most the 11"):
        make_loader(batch_size=12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 6}, "grpo.seed"),
        ({"shuffle": False}, "data.shuffle"),
        ({"dataset_size": 12}, "the training data"),
        ({"position": 12}, "no place in the data"),
        ({"epoch": -1}, "no place in the data"),
        ({"epoch": "1"}, "no place in the data"),
    ],
    ids=lambda value: str(value),
)
def test_state_of_another_run_is_refused(change: dict, message: str) -> None:
    loader = make_loader()
    before = loader.state_dict()
    with pytest.raises(CheckpointError, match=message):
        loader.load_state_dict({**before, **change})
    assert loader.state_dict() == before


def test_incomplete_state_is_refused_with_the_missing_names() -> None:
    state = make_loader().state_dict()
    del state["position"]
    with pytest.raises(CheckpointError, match="position"):
        make_loader().load_state_dict(state)
