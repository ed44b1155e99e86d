"""Which rank holds which slice: a grid of ranks with named axes. No torch, no Ray."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


class NamedSharding:
    """A grid of ranks, outermost axis first, e.g. ``("dp", "cp", "tp")``.

    Args:
        layout: nested sequence or integer array of ranks, one dimension per axis; a rank appears once.
        names: axis names, in the order of the dimensions.

    Example:
        ``NamedSharding.from_sizes(dp=2, tp=2)`` is ``[[0, 1], [2, 3]]``: ranks 0 and 1 hold the same data, and
        ``get_ranks(tp=0)`` is the sharding ``[0, 2]`` over ``dp``.
    """

    def __init__(self, layout: Sequence | np.ndarray, names: Sequence[str]) -> None:
        grid = np.asarray(layout)
        if not np.issubdtype(grid.dtype, np.integer):
            raise ValueError(f"layout: got dtype {grid.dtype}; must hold integer ranks.")
        if grid.ndim != len(names):
            raise ValueError(f"names: got {len(names)} ({', '.join(names)}); the layout has {grid.ndim} dimensions.")
        if len(set(names)) != len(names):
            raise ValueError(f"names: got {list(names)}; each axis needs its own name.")
        ranks, counts = np.unique(grid, return_counts=True)
        if (counts > 1).any():
            raise ValueError(f"layout: ranks {ranks[counts > 1].tolist()} appear more than once.")
        self._grid = grid.astype(np.int64)
        self._names = tuple(names)

    @classmethod
    def from_sizes(cls, **sizes: int) -> NamedSharding:
        """Number the ranks 0..n-1 over axes of the given sizes, last axis fastest."""
        bad = {name: size for name, size in sizes.items() if size < 1}
        if bad or not sizes:
            raise ValueError(f"sizes: got {sizes}; every axis needs a size >= 1.")
        return cls(np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values())), list(sizes))

    @property
    def names(self) -> list[str]:
        """Axis names, outermost first."""
        return list(self._names)

    @property
    def shape(self) -> dict[str, int]:
        """Axis name to size."""
        return dict(zip(self._names, self._grid.shape, strict=True))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._grid.ndim

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self._grid.size)

    @property
    def layout(self) -> np.ndarray:
        """Copy of the grid, int64 [sizes of the axes]."""
        return self._grid.copy()

    def get_axis_index(self, name: str) -> int:
        """Position of an axis among the dimensions of the grid."""
        if name not in self._names:
            raise ValueError(f"axis: got {name!r}; must be one of {', '.join(self._names)}.")
        return self._names.index(name)

    def get_axis_size(self, name: str) -> int:
        """Number of slices along an axis."""
        return int(self._grid.shape[self.get_axis_index(name)])

    def get_worker_coords(self, rank: int) -> dict[str, int]:
        """Index of a rank along every axis."""
        found = np.argwhere(self._grid == rank)
        if len(found) == 0:
            raise ValueError(f"rank: got {rank}; the layout holds {sorted(self._grid.ravel().tolist())}.")
        return dict(zip(self._names, found[0].tolist(), strict=True))

    def get_ranks(self, **coords: int) -> NamedSharding | int:
        """Fix some axes.

        Args:
            **coords: axis name to index along it.

        Returns:
            The sharding over the remaining axes, or the one rank when every axis is fixed.
        """
        selection: list[int | slice] = [slice(None)] * self.ndim
        for name, index in coords.items():
            size = self.get_axis_size(name)
            if not 0 <= index < size:
                raise IndexError(f"{name}: got {index}; the axis has {size} slices (0 to {size - 1}).")
            selection[self.get_axis_index(name)] = index
        chosen = self._grid[tuple(selection)]
        rest = [name for name in self._names if name not in coords]
        return NamedSharding(chosen, rest) if rest else int(chosen)

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """Sorted ranks at the given indices of some axes."""
        chosen = self.get_ranks(**coords)
        return [chosen] if isinstance(chosen, int) else sorted(chosen.layout.ravel().tolist())

    def ranks_sharing_data(self, rank: int, *, data_axes: Sequence[str]) -> list[int]:
        """Ranks that receive the same rows as ``rank`` (itself included) when ``data_axes`` split the data."""
        coords = self.get_worker_coords(rank)
        for axis in data_axes:
            self.get_axis_index(axis)
        return self.get_ranks_by_coord(**{axis: coords[axis] for axis in data_axes})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NamedSharding):
            return NotImplemented
        return self._names == other._names and np.array_equal(self._grid, other._grid)

    def __hash__(self) -> int:
        return hash((self._names, self._grid.shape, self._grid.tobytes()))

    def __repr__(self) -> str:
        return f"NamedSharding({self._grid.tolist()}, names={self.names})"
