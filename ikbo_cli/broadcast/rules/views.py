"""Views: where the candidate axis goes when axes are merged, split, moved, added or cut."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from ikbo_cli.broadcast.context import Context
from ikbo_cli.broadcast.maps import Map
from ikbo_cli.broadcast.registry import rule
from ikbo_cli.broadcast.rules.pointwise import join
from ikbo_cli.broadcast.values import (
    Broadcast,
    Concat,
    Full,
    Sum,
    Value,
    broadcasts_in,
    hint,
    normalize_dim,
    shape_of,
)

aten = torch.ops.aten

MAX_INTERLEAVED_PARTS = 256


@dataclasses.dataclass(frozen=True)
class Group:
    """Axes `[start, stop)` of the input that become axes `[out_start, out_stop)` of the output."""

    start: int
    stop: int
    out_start: int
    out_stop: int


def view_groups(before: Sequence[int], after: Sequence[int]) -> list[Group]:
    """Match the axes of two shapes with equal element count, in the smallest groups; unit axes join a neighbour."""
    groups = []
    i = j = 0
    while i < len(before) or j < len(after):
        start, out_start = i, j
        left = right = 1
        if i < len(before):
            left, i = before[i], i + 1
        if j < len(after):
            right, j = after[j], j + 1
        while left != right:
            if (left < right and i < len(before)) or j >= len(after):
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        groups.append(Group(start, i, out_start, j))
    return groups


def resolve(sizes: Sequence[Any], numel: int) -> tuple[int, ...]:
    """The concrete shape a view asks for; a single -1 is what remains."""
    hints = [hint(size) for size in sizes]
    if -1 in hints:
        rest = math.prod(size for size in hints if size != -1)
        hints[hints.index(-1)] = numel // rest if rest else 0
    return tuple(hints)


@rule(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def view(ctx: Context, x: Value, size: Sequence[Any]) -> Any:
    """A view keeps the rows where the candidate axis stays outermost among the axes it is merged with."""
    after = resolve(size, math.prod(x.shape))
    result = None
    if isinstance(x, Broadcast):
        result = _view_broadcast(ctx, x, size, after)
    elif isinstance(x, Concat):
        result = _view_concat(ctx, x, size, after)
    elif isinstance(x, Sum) and all(term.shape == x.shape for term in x.terms):
        terms = [ctx.apply(aten.reshape.default, term, list(size)) for term in x.terms]
        if all(isinstance(term, (Full, Broadcast)) for term in terms):
            return dataclasses.replace(x, terms=tuple(terms))
    return ctx.materialized(x, size) if result is None else result


def _view_broadcast(ctx: Context, x: Broadcast, size: Sequence[Any], after: tuple[int, ...]) -> Value | None:
    before = x.shape
    try:
        group = next(g for g in view_groups(before, after) if g.start <= x.dim < g.stop)
    except (StopIteration, IndexError):
        return None
    prefix = math.prod(before[group.start : x.dim])
    outer = next((d for d in range(group.out_start, group.out_stop) if after[d] != 1), group.out_start)
    if x.map.is_expand and x.mult == 1 and prefix != 1:
        return _merge_expanded(ctx, x, size, after, group, prefix, outer)
    rows = x.map.rows
    if prefix != 1 or rows == 0 or after[outer] % rows:
        return None
    mult = after[outer] // rows
    # The rest of the group must hold exactly what one row holds, or rows would be cut.
    if mult * math.prod(after[outer + 1 : group.out_stop]) * rows != math.prod(before[group.start : group.stop]):
        return None
    compact = list(size)
    compact[outer] = _compact_rows(ctx, x, mult)
    return x.with_node(ctx.call(aten.reshape.default, x.node, compact), dim=outer, mult=mult)


def _compact_rows(ctx: Context, x: Broadcast, mult: int) -> Any:
    length = shape_of(x.node)[x.dim]
    if x.map.is_expand:
        return length // x.mult * mult
    rows = ctx.size(x.node, x.dim)
    if x.mult != 1:
        rows = ctx.call(operator.floordiv, rows, x.mult)
    return rows if mult == 1 else ctx.call(operator.mul, rows, mult)


def _merge_expanded(
    ctx: Context,
    x: Broadcast,
    size: Sequence[Any],
    after: tuple[int, ...],
    group: Group,
    prefix: int,
    outer: int,
) -> Value | None:
    """`[U, 1, D] -> expand [U, R, D] -> [U * R, D]`: every row of the outer axes is repeated R times in place."""
    times = x.map.rows
    rows = prefix * times
    if after[outer] % rows:
        return None
    mult = after[outer] // rows
    if mult * math.prod(after[outer + 1 : group.out_stop]) * rows != math.prod(x.shape[group.start : group.stop]):
        return None
    outer_axes = range(group.start, x.dim)
    if len([d for d in outer_axes if x.shape[d] != 1]) != 1:
        return None
    wide = next(d for d in outer_axes if x.shape[d] != 1)
    source_rows = ctx.size(x.node, wide)
    compact = list(size)
    compact[outer] = source_rows if mult == 1 else ctx.call(operator.mul, source_rows, mult)
    node = ctx.call(aten.reshape.default, x.node, compact)
    step = ctx.repeat_step(ctx.rows(x.map), rows, source_rows)
    return dataclasses.replace(x, node=node, map=Map((step,)), dim=outer, mult=mult)


def _view_concat(ctx: Context, x: Concat, size: Sequence[Any], after: tuple[int, ...]) -> Value | None:
    before = x.shape
    try:
        group = next(g for g in view_groups(before, after) if g.start <= x.dim < g.stop)
    except (StopIteration, IndexError):
        return None
    prefix = math.prod(before[group.start : x.dim])
    if prefix != 1:
        return _view_interleaved(ctx, x, size, after, group)
    outer = next((d for d in range(group.out_start, group.out_stop) if after[d] != 1), group.out_start)
    total, inner = sum(x.widths), math.prod(before[x.dim + 1 : group.stop])
    if inner * total == 0:
        return None
    parts = []
    for part, width in zip(x.parts, x.widths, strict=True):
        scaled, remainder = divmod(after[outer] * width, total)
        if remainder:
            return None
        sizes = list(size)
        sizes[outer] = scaled
        parts.append(ctx.apply(aten.reshape.default, part, sizes))
    return join(parts, outer)


def _view_interleaved(
    ctx: Context, x: Concat, size: Sequence[Any], after: tuple[int, ...], group: Group
) -> Value | None:
    """`[B, F, D1 + D2] -> [B, F * (D1 + D2)]`: the parts of field 0, then of field 1, ..."""
    outer_axes = list(range(group.start, x.dim))
    axis = next((d for d in outer_axes if x.shape[d] != 1), None)
    if axis is None or sum(x.shape[d] != 1 for d in outer_axes) != 1 or group.out_stop - group.out_start != 1:
        return None
    if any(b.dim == axis for b in broadcasts_in(x)) or not _is_static(ctx, x, axis):
        return None
    fields = x.shape[axis]
    if fields * len(x.parts) > MAX_INTERLEAVED_PARTS:
        return None
    parts = []
    for field in range(fields):
        for part in x.parts:
            sizes = list(size)
            sizes[group.out_start] = part.shape[x.dim] * math.prod(x.shape[x.dim + 1 : group.stop])
            piece = ctx.apply(aten.slice.Tensor, part, axis, field, field + 1)
            parts.append(ctx.apply(aten.reshape.default, piece, sizes))
    return join(parts, group.out_start)


def _is_static(ctx: Context, x: Concat, axis: int) -> bool:
    """Whether the axis has a fixed length: only then can its fields be told apart by number."""
    return not ctx.is_dynamic(x.shape[axis])


def per_part(ctx: Context, x: Concat, dim: int, *args: Any) -> Value:
    """Apply the current op to every part; the concat axis of the result is `dim`."""
    return join([ctx.apply(ctx.op, part, *args) for part in x.parts], dim)


@rule(aten.flatten.using_ints)
def flatten(ctx: Context, x: Value, start_dim: int = 0, end_dim: int = -1) -> Any:
    """`flatten` is a view whose merged axis takes what remains."""
    ndim = len(x.shape)
    start, end = normalize_dim(start_dim, ndim), normalize_dim(end_dim, ndim)
    sizes = [
        *_sizes(ctx, x, range(start)),
        math.prod(x.shape[start : end + 1]),
        *_sizes(ctx, x, range(end + 1, ndim)),
    ]
    dynamic = [d for d in range(start, end + 1) if ctx.is_dynamic(x.shape[d])]
    if dynamic:
        sizes[start] = -1
    return _as_view(ctx, x, sizes, (start_dim, end_dim))


@rule(aten.unflatten.int)
def unflatten(ctx: Context, x: Value, dim: int, sizes: Sequence[Any]) -> Any:
    """`unflatten` is a view too."""
    ndim = len(x.shape)
    at = normalize_dim(dim, ndim)
    split = resolve(sizes, x.shape[at])
    inner = [size if hint(size) != -1 else split[i] for i, size in enumerate(sizes)]
    if any(hint(s) == -1 for s in sizes) and ctx.is_dynamic(x.shape[at]):
        inner = list(sizes)
    wanted = [*_sizes(ctx, x, range(at)), *inner, *_sizes(ctx, x, range(at + 1, ndim))]
    return _as_view(ctx, x, wanted, (dim, sizes))


def _sizes(ctx: Context, x: Value, dims: Sequence[int]) -> list[Any]:
    """Sizes of some axes as arguments: numbers where they are fixed, else what the program computes."""
    return [ctx.apply(aten.sym_size.int, x, d) if ctx.is_dynamic(x.shape[d]) else x.shape[d] for d in dims]


def _as_view(ctx: Context, x: Value, sizes: list[Any], original: tuple[Any, ...]) -> Any:
    after = resolve(sizes, math.prod(x.shape))
    result = None
    if isinstance(x, Broadcast):
        result = _view_broadcast(ctx, x, sizes, after)
    elif isinstance(x, Concat):
        result = _view_concat(ctx, x, sizes, after)
    return ctx.materialized(x, *original) if result is None else result


@rule(aten.unsqueeze.default)
def unsqueeze(ctx: Context, x: Value, dim: int) -> Any:
    """A new axis of size 1."""
    at = normalize_dim(dim, len(x.shape) + 1)
    if isinstance(x, Broadcast):
        return x.with_node(ctx.call(ctx.op, x.node, at), dim=x.dim + (at <= x.dim))
    if isinstance(x, Concat):
        return per_part(ctx, x, x.dim + (at <= x.dim), at)
    if isinstance(x, Sum) and all(len(term.shape) == len(x.shape) for term in x.terms):
        return dataclasses.replace(x, terms=tuple(ctx.apply(ctx.op, term, at) for term in x.terms))
    return ctx.materialized(x, dim)


@rule(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def squeeze(ctx: Context, x: Value, dim: int | Sequence[int] | None = None) -> Any:
    """Axes of size 1 disappear; the compact tensor must not lose the candidate axis when U is 1."""
    ndim = len(x.shape)
    asked = range(ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    dims = sorted(d for d in {normalize_dim(d, ndim) for d in asked} if x.shape[d] == 1)
    if isinstance(x, Broadcast) and x.dim not in dims:
        node = ctx.call(aten.squeeze.dims, x.node, dims) if dims else x.node
        return x.with_node(node, dim=x.dim - sum(d < x.dim for d in dims))
    if isinstance(x, Concat) and x.dim not in dims:
        shift = sum(d < x.dim for d in dims)
        squeezed = [ctx.apply(aten.squeeze.dims, part, dims) if dims else part for part in x.parts]
        return join(squeezed, x.dim - shift)
    return ctx.materialized(x) if dim is None else ctx.materialized(x, dim)


@rule(aten.permute.default)
def permute(ctx: Context, x: Value, dims: Sequence[int]) -> Any:
    """Axes move, rows stay."""
    order = [normalize_dim(d, len(x.shape)) for d in dims]
    if order == list(range(len(order))):
        return x
    if isinstance(x, Broadcast):
        return x.with_node(ctx.call(ctx.op, x.node, order), dim=order.index(x.dim))
    if isinstance(x, Concat):
        return per_part(ctx, x, order.index(x.dim), order)
    if isinstance(x, Sum) and all(len(term.shape) == len(x.shape) for term in x.terms):
        return dataclasses.replace(x, terms=tuple(ctx.apply(ctx.op, term, order) for term in x.terms))
    return ctx.materialized(x, dims)


@rule(aten.transpose.int, aten.swapaxes.default)
def transpose(ctx: Context, x: Value, dim0: int, dim1: int) -> Any:
    """A permutation of two axes."""
    order = list(range(len(x.shape)))
    a, b = normalize_dim(dim0, len(order)), normalize_dim(dim1, len(order))
    order[a], order[b] = order[b], order[a]
    return ctx.apply(aten.permute.default, x, order)


@rule(aten.movedim.int)
def movedim(ctx: Context, x: Value, source: int, destination: int) -> Any:
    """One axis moves, the others keep their order."""
    ndim = len(x.shape)
    order = [d for d in range(ndim) if d != normalize_dim(source, ndim)]
    order.insert(normalize_dim(destination, ndim), normalize_dim(source, ndim))
    return ctx.apply(aten.permute.default, x, order)


@rule(aten.t.default, aten.numpy_T.default, aten.mT.default)
def t(ctx: Context, x: Value) -> Any:
    """Transposition without arguments."""
    order = list(range(len(x.shape)))
    if ctx.op is aten.mT.default:
        order[-2], order[-1] = order[-1], order[-2]
    else:
        order.reverse()
    return ctx.apply(aten.permute.default, x, order)


@rule(aten.select.int)
def select(ctx: Context, x: Value, dim: int, index: Any) -> Any:
    """One entry of another axis; of a concat, one entry of the part that holds it."""
    at = normalize_dim(dim, len(x.shape))
    if isinstance(x, Broadcast) and at != x.dim:
        return x.with_node(ctx.call(ctx.op, x.node, at, index), dim=x.dim - (at < x.dim))
    if isinstance(x, Concat):
        if at != x.dim:
            return per_part(ctx, x, x.dim - (at < x.dim), at, index)
        if isinstance(index, int) and not ctx.is_dynamic(x.shape[at]):
            position = index + x.shape[at] if index < 0 else index
            for part, width in zip(x.parts, x.widths, strict=True):
                if position < width:
                    return ctx.apply(aten.select.int, part, at, position)
                position -= width
    return ctx.materialized(x, dim, index)


@rule(aten.slice.Tensor)
def slice_(ctx: Context, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """A cut of another axis; of a concat, cuts of the parts it touches; the whole axis is no cut at all."""
    at = normalize_dim(dim, len(x.shape))
    length = x.shape[at]
    first, last = _bounds(start, end, length)
    if (first, last, step) == (0, length, 1):
        return x
    if isinstance(x, Broadcast) and at != x.dim:
        return x.with_node(ctx.call(ctx.op, x.node, at, start, end, step))
    if isinstance(x, Concat):
        if at != x.dim:
            return per_part(ctx, x, x.dim, at, start, end, step)
        if step == 1 and not ctx.is_dynamic(length) and last > first:
            return _cut(ctx, x, first, last)
    return ctx.materialized(x, dim, start, end, step)


def _bounds(start: Any, end: Any, length: int) -> tuple[int, int]:
    first = 0 if start is None else hint(start)
    last = length if end is None else hint(end)
    first = max(0, first + length) if first < 0 else min(first, length)
    last = max(0, last + length) if last < 0 else min(last, length)
    return first, last


def _cut(ctx: Context, x: Concat, first: int, last: int) -> Value:
    parts = []
    offset = 0
    for part, width in zip(x.parts, x.widths, strict=True):
        lo, hi = max(first - offset, 0), min(last - offset, width)
        if lo < hi:
            parts.append(ctx.apply(aten.slice.Tensor, part, x.dim, lo, hi))
        offset += width
    return join(parts, x.dim)


@rule(aten.narrow.default)
def narrow(ctx: Context, x: Value, dim: int, start: Any, length: Any) -> Any:
    """A slice by length."""
    if isinstance(start, int) and isinstance(length, int) and start >= 0:
        return ctx.apply(aten.slice.Tensor, x, dim, start, start + length)
    return ctx.materialized(x, dim, start, length)


@rule(aten.split.Tensor)
def split(ctx: Context, x: Value, split_size: Any, dim: int = 0) -> Any:
    """Pieces of equal size."""
    at = normalize_dim(dim, len(x.shape))
    if isinstance(x, Sum) or ctx.is_dynamic(x.shape[at]):
        return ctx.materialized(x, split_size, dim)
    size, length = hint(split_size), x.shape[at]
    return _pieces(ctx, x, at, [min(size, length - start) for start in range(0, length, size)])


@rule(aten.split_with_sizes.default, aten.split.sizes)
def split_with_sizes(ctx: Context, x: Value, split_sizes: Sequence[Any], dim: int = 0) -> Any:
    """Pieces of given sizes."""
    at = normalize_dim(dim, len(x.shape))
    if isinstance(x, Sum) or ctx.is_dynamic(x.shape[at]):
        return ctx.materialized(x, split_sizes, dim)
    return _pieces(ctx, x, at, [hint(size) for size in split_sizes])


@rule(aten.chunk.default)
def chunk(ctx: Context, x: Value, chunks: int, dim: int = 0) -> Any:
    """A number of pieces."""
    at = normalize_dim(dim, len(x.shape))
    if isinstance(x, Sum) or ctx.is_dynamic(x.shape[at]):
        return ctx.materialized(x, chunks, dim)
    size = -(-x.shape[at] // chunks)
    return _pieces(ctx, x, at, [min(size, x.shape[at] - start) for start in range(0, x.shape[at], size)])


def _pieces(ctx: Context, x: Value, dim: int, sizes: Sequence[int]) -> list[Any]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        ctx.apply(aten.slice.Tensor, x, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)
    ]


@rule(aten.unbind.int)
def unbind(ctx: Context, x: Value, dim: int = 0) -> Any:
    """Every entry of an axis."""
    at = normalize_dim(dim, len(x.shape))
    if isinstance(x, Sum) or ctx.is_dynamic(x.shape[at]) or (isinstance(x, Broadcast) and x.dim == at):
        return ctx.materialized(x, dim)
    return [ctx.apply(aten.select.int, x, at, i) for i in range(x.shape[at])]


@rule(aten.expand.default, always=True)
def expand(ctx: Context, x: Value, size: Sequence[Any], *, implicit: bool = False) -> Any:
    """Repeats a row without writing it: the start of a broadcast (form F2), or a new axis of one."""
    _ndim, grown = len(x.shape), len(size) - len(x.shape)
    if isinstance(x, Sum):
        return ctx.materialized(x, size)
    if isinstance(x, Concat) and hint(size[x.dim + grown]) in (-1, x.shape[x.dim]):
        parts = []
        for part in x.parts:
            sizes = list(size)
            sizes[x.dim + grown] = -1
            parts.append(ctx.apply(ctx.op, part, sizes))
        return join(parts, x.dim + grown)
    if isinstance(x, Concat):
        return ctx.materialized(x, size)
    wide = [
        d for d in range(len(size))
        if hint(size[d]) not in (-1, 1) and (d < grown or (x.shape[d - grown] == 1 and hint(size[d]) != 1))
    ]  # fmt: skip
    if isinstance(x, Broadcast):
        if x.dim + grown in wide:
            return ctx.materialized(x, size)
        sizes = [-1 if d == x.dim + grown else s for d, s in enumerate(size)]
        return x.with_node(ctx.call(ctx.op, x.node, sizes), dim=x.dim + grown) if wide or grown else x
    if not wide:
        return ctx.materialized(x, size)
    dim = wide[0]
    node = x.node
    for _ in range(grown):
        node = ctx.call(aten.unsqueeze.default, node, 0)
    if len(wide) > 1:
        rest = [1 if d == dim else s for d, s in enumerate(size)]
        node = ctx.call(aten.expand.default, node, [hint(s) if not ctx.is_dynamic(hint(s)) else s for s in rest])
    step = ctx.expand_step(size[dim], hint(size[dim]))
    source = "" if ctx.is_constant(x) else ctx.origin
    return Broadcast(node, Map((step,)), dim, source=source)


@rule(aten.expand_as.default, always=True)
def expand_as(ctx: Context, x: Value, other: Value) -> Any:
    """`expand` to the shape of another tensor, whose values do not matter."""
    return ctx.apply(aten.expand.default, x, _sizes(ctx, other, range(len(other.shape))))


@rule(aten.broadcast_to.default, always=True)
def broadcast_to(ctx: Context, x: Value, size: Sequence[Any]) -> Any:
    """Another name for `expand`."""
    return ctx.apply(aten.expand.default, x, size)


@rule(aten.repeat.default, aten.tile.default, always=True)
def repeat(ctx: Context, x: Value, repeats: Sequence[Any]) -> Any:
    """Repeats a whole tensor along its axes; along one alone it is a broadcast."""
    if isinstance(x, (Concat, Sum)):
        return ctx.materialized(x, repeats)
    times = [*[1] * (len(x.shape) - len(repeats)), *repeats]
    grown = len(times) - len(x.shape)
    shape = (*[1] * grown, *x.shape)
    wide = [d for d, t in enumerate(times) if hint(t) != 1]
    if isinstance(x, Broadcast):
        if not wide and not grown:
            return x
        if x.dim + grown in wide:
            return ctx.materialized(x, repeats)
        return x.with_node(ctx.call(aten.repeat.default, x.node, times), dim=x.dim + grown)
    if not wide:
        return ctx.materialized(x, repeats)
    dim = next((d for d in wide if shape[d] == 1), wide[0])
    node = x.node
    for _ in range(grown):
        node = ctx.call(aten.unsqueeze.default, node, 0)
    if len(wide) > 1:
        node = ctx.call(aten.repeat.default, node, [1 if d == dim else t for d, t in enumerate(times)])
    rows = hint(times[dim]) * shape[dim]
    step: Any
    if shape[dim] == 1:
        step = ctx.expand_step(times[dim], rows)
    else:
        step = ctx.tile_step(times[dim], rows, ctx.size(node, dim))
    return Broadcast(node, Map((step,)), dim, source="" if ctx.is_constant(x) else ctx.origin)
