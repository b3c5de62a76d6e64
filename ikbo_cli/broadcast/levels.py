"""Finding the level at which several operands can be computed together without writing any of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ikbo_cli.broadcast.context import Context
from ikbo_cli.broadcast.maps import Map
from ikbo_cli.broadcast.values import Broadcast, Concat, Full, Node, Sum, Value, shape_of


@dataclasses.dataclass(frozen=True)
class Level:
    """A common level: `axis` counts from the right (1 is the last), so that ranks may differ."""

    axis: int
    map: Map
    mult: int
    sources: tuple[Broadcast, ...]

    def value(self, node: Node, ndim: int | None = None) -> Broadcast:
        """What an op computed at this level, as a value."""
        dim = (len(shape_of(node)) if ndim is None else ndim) - self.axis
        source = next((s.source for s in self.sources if s.source), "")
        return Broadcast(node, self.map, dim, self.mult, source, moved=True)


def shared_level(values: Sequence[Value]) -> Level | None:
    """The finest common level of right-aligned operands, or None if some operand varies over the rows otherwise.

    An operand without the axis, or with size 1 on it, fits every level; so does a row that is merely expanded.
    """
    broadcasts = [value for value in values if isinstance(value, Broadcast)]
    if not broadcasts or any(isinstance(value, (Concat, Sum)) for value in values):
        return None
    axes = {len(b.shape) - b.dim for b in broadcasts}
    if len(axes) != 1:
        return None
    axis = axes.pop()
    for value in values:
        if isinstance(value, Full) and len(value.shape) >= axis and value.shape[-axis] != 1:
            return None
    gathered = [b for b in broadcasts if not b.map.is_expand]
    if not gathered:
        if len({(b.map, b.mult) for b in broadcasts}) != 1:
            return None
        return Level(axis, broadcasts[0].map, broadcasts[0].mult, tuple(broadcasts))
    if len({b.mult for b in gathered}) != 1 or any(b.mult != 1 for b in broadcasts if b.map.is_expand):
        return None
    level: Map | None = gathered[0].map
    for other in gathered[1:]:
        level = level.common_suffix(other.map) if level else None
    if level is None or any(b.shape[b.dim] != gathered[0].shape[gathered[0].dim] for b in broadcasts):
        return None
    return Level(axis, level, gathered[0].mult, (*gathered, *broadcasts))


def at_level(ctx: Context, value: Any, level: Level) -> Any:
    """The node of an operand at a level found by `shared_level`."""
    match value:
        case Broadcast() if value.map.is_expand:
            return value.node
        case Broadcast():
            return ctx.lift(value.node, value.map.lead(level.map), value.dim, value.mult)
        case _:
            return value


def with_rows(ctx: Context, value: Value, level: Level) -> Node:
    """Like `at_level`, for ops that do not broadcast: an expanded row is repeated to the level's row count."""
    node = at_level(ctx, value, level)
    if isinstance(value, Broadcast) and value.map.is_expand and not level.map.is_expand:
        ndim = len(shape_of(node))
        anchor = next(s for s in level.sources if not s.map.is_expand)
        rows = ctx.size(ctx.lift(anchor.node, anchor.map.lead(level.map), anchor.dim, anchor.mult), anchor.dim)
        return ctx.call(torch.ops.aten.expand.default, node, [rows if d == value.dim else -1 for d in range(ndim)])
    return node.node if isinstance(node, Full) else node
