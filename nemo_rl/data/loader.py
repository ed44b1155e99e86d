"""Batches of training prompts in an order that a resumed run continues exactly.

torchdata's `StatefulDataLoader` was considered. Its state is an opaque snapshot of its sampler and worker processes, it
replays a part of the epoch on resume, and it imports torch. Here the order of an epoch is a function of (seed, epoch),
so three numbers are the whole position, in JSON, and resuming costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_rl.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from nemo_rl.data.datasets import PromptDataset, PromptExample


class PromptLoader:
    """Iterates over one epoch at a time; the incomplete last batch of an epoch is dropped.

    `iter(loader)` goes on where the loader stands. It ends with the epoch, and the next `iter` starts the next one.
    """

    def __init__(self, dataset: PromptDataset, batch_size: int, *, shuffle: bool, seed: int) -> None:
        """Stand at the start of the first epoch.

        Args:
            dataset: prompts.
            batch_size: prompts per batch.
            shuffle: draw a new order for each epoch; otherwise the data set's order.
            seed: of the orders.

        Raises:
            ConfigError: the data set is smaller than one batch.
        """
        if batch_size > len(dataset):
            raise ConfigError(
                f"grpo.num_prompts_per_step: got {batch_size}; must be at most the {len(dataset)} prompts of the "
                "training data. Lower it or give more data."
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._position = 0

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self._dataset) // self._batch_size

    def __iter__(self) -> Iterator[list[PromptExample]]:
        """Yield the rest of the current epoch, then move to the start of the next."""
        order = self._order()
        while self._position + self._batch_size <= len(order):
            start = self._position
            # Moved before the batch is handed out: a state saved while it is being used must not repeat it.
            self._position = start + self._batch_size
            yield [self._dataset[int(i)] for i in order[start : self._position]]
        self._epoch += 1
        self._position = 0

    @property
    def dataset(self) -> PromptDataset:
        """The prompts, in the data set's own order."""
        return self._dataset

    @property
    def epoch(self) -> int:
        """Epochs that are over."""
        return self._epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch handed out, and what it is a position in; all JSON values."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "dataset_size": len(self._dataset),
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position; iterators made before are not valid any more.

        The batch size may differ from the saved run's: positions count prompts.

        Raises:
            CheckpointError: the state is incomplete or belongs to other data or another order.
        """
        current = self.state_dict()
        missing = sorted(set(current) - set(state))
        if missing:
            raise CheckpointError(
                f"train_dataloader.json: lacks {missing}; it was not written by this loader. Remove the checkpoint."
            )
        sources = {"dataset_size": "the training data", "shuffle": "data.shuffle", "seed": "grpo.seed"}
        for name, source in sources.items():
            if state[name] != current[name]:
                raise CheckpointError(
                    f"train_dataloader.json: {name} is {state[name]!r} in the checkpoint and {current[name]!r} in this "
                    f"run, so its position means other prompts. Restore {source}, or start with another checkpoint_dir."
                )
        epoch, position = state["epoch"], state["position"]
        if not (
            isinstance(epoch, int) and isinstance(position, int) and epoch >= 0 and 0 <= position <= len(self._dataset)
        ):
            raise CheckpointError(
                f"train_dataloader.json: epoch {epoch!r}, position {position!r} is no place in the data."
            )
        self._epoch, self._position = epoch, position

    def _order(self) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._dataset))
        return np.random.default_rng([self._seed, self._epoch]).permutation(len(self._dataset))
