"""Maps: which source row each expanded row reads.

A map is a chain of steps, coarse to fine: user -> vendor -> item is two `Gather` steps. Two values can be combined
without writing either when one map is a suffix of the other, or when both share one: the coarser value is taken to
the finer level first, which is exact and still compact.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias


@dataclasses.dataclass(frozen=True, eq=False)
class Gather:
    """Row `b` reads source row `index[b]`; `index` is an int32/int64 `[rows]` node, in any order.

    `wraps` keeps the meaning of `x[index]`, which allows negative rows where `index_select` does not.
    """

    index: Any
    rows: int
    wraps: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Expand:
    """Every row reads the one source row; `size` is the number of rows (an int or a scalar node)."""

    size: Any
    rows: int


@dataclasses.dataclass(frozen=True, eq=False)
class Repeat:
    """Row `b` reads source row `b // times`."""

    times: Any
    rows: int


@dataclasses.dataclass(frozen=True, eq=False)
class Tile:
    """Row `b` reads source row `b % source_rows`."""

    times: Any
    rows: int


Step: TypeAlias = Gather | Expand | Repeat | Tile


@dataclasses.dataclass(frozen=True)
class Map:
    """A chain of steps, coarse to fine. Steps compare by identity: the context hands out one object a meaning."""

    steps: tuple[Step, ...]

    @property
    def rows(self) -> int:
        """Number of expanded rows (hint)."""
        return self.steps[-1].rows

    @property
    def is_expand(self) -> bool:
        """True when all rows read one single source row."""
        return len(self.steps) == 1 and isinstance(self.steps[0], Expand)

    def then(self, step: Step) -> Map:
        """The map of a value whose rows are read once more, through `step`."""
        return Map((*self.steps, step))

    def common_suffix(self, other: Map) -> Map | None:
        """The finest level that both maps pass through, or None."""
        shared: list[Step] = []
        for mine, theirs in zip(reversed(self.steps), reversed(other.steps), strict=False):
            if mine is not theirs:
                break
            shared.insert(0, mine)
        return Map(tuple(shared)) if shared else None

    def lead(self, suffix: Map) -> tuple[Step, ...]:
        """The steps that take a value of this map down to the level where `suffix` begins."""
        return self.steps[: len(self.steps) - len(suffix.steps)]
