"""Values: a tensor of the program together with what we know of its rows.

A walk replaces every tensor of the original program by one of these. `node` is whatever the context computes
with: an `fx.Node` of the new graph, or a real tensor when rules run eagerly. `shape` is always the shape of the
*original* tensor (hint sizes: see `walk.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from ikbo_cli.broadcast.maps import Map

Node: TypeAlias = Any
"""An `fx.Node` whose `meta["val"]` is set, or a tensor."""


def val(node: Node) -> Any:
    """The (fake) tensor or number behind a node."""
    return node.meta["val"] if isinstance(node, fx.Node) else node


def shape_of(node: Node) -> tuple[int, ...]:
    """Concrete (hint) shape of a tensor node."""
    return tuple(val(node).shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Full:
    """An ordinary tensor, computed exactly as the original does. The safe default: nothing is claimed."""

    node: Node

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return shape_of(self.node)

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return val(self.node).dtype  # type: ignore[no-any-return]


class Uniform(Full):
    """Computed from parameters and constants alone: weights, tables, positions. Never has a candidate axis."""


@dataclasses.dataclass(frozen=True, eq=False)
class Broadcast:
    """A tensor that repeats rows: `original == node.index_select(dim, map)`.

    Attributes:
        node: The compact tensor, `map.source_rows * mult` long on `dim`.
        map: Which compact row each expanded row reads.
        dim: The candidate axis, non-negative.
        mult: Rows a source row after a flatten: expanded row `b * mult + j` is compact row `map[b] * mult + j`.
        source: Name of the node or input of the original program where the repetition starts.
        moved: True once any op has run on the compact tensor in place of the expanded one.
    """

    node: Node
    map: Map
    dim: int
    mult: int = 1
    source: str = ""
    moved: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the expanded tensor."""
        compact = shape_of(self.node)
        return (*compact[: self.dim], self.map.rows * self.mult, *compact[self.dim + 1 :])

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return val(self.node).dtype  # type: ignore[no-any-return]

    def with_node(self, node: Node, dim: int | None = None, mult: int | None = None) -> Broadcast:
        """The same rows after an op ran on the compact tensor; the candidate axis now is `dim`."""
        return dataclasses.replace(
            self,
            node=node,
            dim=self.dim if dim is None else dim,
            mult=self.mult if mult is None else mult,
            moved=True,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Concat:
    """A concatenation that has not been written to memory: `original == cat(parts, dim)`.

    Parts keep their own kind and are never `Concat` along the same axis. `dim` is not the candidate axis of any part.
    """

    parts: tuple[Value, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the concatenated tensor."""
        first = self.parts[0].shape
        return (*first[: self.dim], sum(self.widths), *first[self.dim + 1 :])

    @property
    def widths(self) -> tuple[int, ...]:
        """Length of every part on `dim`."""
        return tuple(part.shape[self.dim] for part in self.parts)

    @property
    def dtype(self) -> torch.dtype:
        """Element type (type promotion among parts is resolved before)."""
        return self.parts[0].dtype


@dataclasses.dataclass(frozen=True, eq=False)
class Sum:
    """An addition that has not been written to memory: terms broadcast against each other.

    At most one term is `Full`, and each `Broadcast` term has a map and axis of its own. Terms of a 16-bit sum may be
    float32 partial sums; `dtype` is what the sum rounds to, once, when it is materialized.
    """

    terms: tuple[Full | Broadcast, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the materialized sum."""
        return tuple(torch.broadcast_shapes(*(term.shape for term in self.terms)))


@dataclasses.dataclass(frozen=True, eq=False)
class Scalar:
    """A number the program computes (a size, or arithmetic on sizes)."""

    node: Node

    @property
    def hint(self) -> Any:
        """Its value under the hint sizes."""
        return val(self.node)


Value: TypeAlias = Full | Broadcast | Concat | Sum
LAZY = (Broadcast, Concat, Sum)


def hint(size: Any) -> int:
    """Concrete value of a size argument: an int, or a number of the program."""
    return int(size.hint if isinstance(size, Scalar) else size)


def is_tensor(value: Any) -> bool:
    """Whether a rule argument stands for a tensor."""
    return isinstance(value, (Full, Broadcast, Concat, Sum))


def has_broadcast(value: Any) -> bool:
    """Whether any part of a value repeats rows."""
    match value:
        case Broadcast():
            return True
        case Concat(parts=items) | Sum(terms=items):
            return any(has_broadcast(item) for item in items)
        case list() | tuple():
            return any(has_broadcast(item) for item in value)
        case _:
            return False


def broadcasts_in(value: Any) -> Sequence[Broadcast]:
    """All `Broadcast` values inside a value or an argument list."""
    match value:
        case Broadcast():
            return [value]
        case Concat(parts=items) | Sum(terms=items):
            return [found for item in items for found in broadcasts_in(item)]
        case list() | tuple():
            return [found for item in value for found in broadcasts_in(item)]
        case _:
            return []


def normalize_dim(dim: int, ndim: int) -> int:
    """A non-negative axis."""
    return dim + ndim if dim < 0 else dim


def normalize_dims(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Non-negative axes; None or an empty list means all of them."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return tuple(range(ndim))
    return tuple(normalize_dim(d, ndim) for d in ([dims] if isinstance(dims, int) else dims))
