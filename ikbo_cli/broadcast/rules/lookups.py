"""Reading rows through an index: where broadcasts start, and where they are composed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ikbo_cli.broadcast.context import Context
from ikbo_cli.broadcast.levels import at_level, shared_level
from ikbo_cli.broadcast.maps import Expand, Map
from ikbo_cli.broadcast.registry import rewrite, rule
from ikbo_cli.broadcast.rules.pointwise import join
from ikbo_cli.broadcast.values import (
    Broadcast,
    Concat,
    Full,
    Node,
    Sum,
    Uniform,
    Value,
    hint,
    normalize_dim,
    shape_of,
    val,
)

aten = torch.ops.aten

INTEGERS = (torch.int32, torch.int64)


def read_rows(ctx: Context, x: Value, dim: int, index: Node, *, wraps: bool = False) -> Value | None:
    """`x` read through a one-dimensional index along `dim`, as a broadcast; None where it is no repetition of rows."""
    if isinstance(x, Uniform) or not ctx.is_dynamic_rows(shape_of(index)[0]):
        return None
    step = ctx.gather_step(index, wraps=wraps)
    match x:
        case Broadcast() if x.dim == dim and x.mult == 1:
            return dataclasses.replace(x, map=x.map.then(step))
        case Concat() if x.dim != dim:
            parts = [read_rows(ctx, part, dim, index, wraps=wraps) for part in x.parts]
            if any(part is None for part in parts):
                return None
            return join([part for part in parts if part is not None], x.dim)
        case Sum():
            return Broadcast(ctx.materialize(x), Map((step,)), dim, source=ctx.origin)
        case Full():
            return Broadcast(x.node, Map((step,)), dim, source=ctx.origin)
        case _:
            return None


@rule(aten.index_select.default, always=True)
def index_select(ctx: Context, x: Value, dim: int, index: Value) -> Any:
    """Rows read through an index: a broadcast starts, or goes one level down."""
    at = normalize_dim(dim, len(x.shape))
    if isinstance(index, Uniform) or (isinstance(index, Full) and not ctx.is_dynamic_rows(index.shape[0])):
        if isinstance(x, Broadcast) and x.dim != at:
            return x.with_node(ctx.call(ctx.op, x.node, at, index))
        if isinstance(x, Concat) and x.dim != at:
            return join([ctx.apply(ctx.op, part, at, index) for part in x.parts], x.dim)
    if isinstance(index, Full) and not isinstance(index, Uniform) and len(index.shape) == 1:
        result = read_rows(ctx, x, at, index.node)
        if result is not None:
            return result
    if isinstance(x, Uniform) and isinstance(index, Broadcast):
        node = ctx.call(ctx.op, x, at, index.node)
        return index.with_node(node, dim=at)
    return ctx.materialized(x, dim, index)


@rule(aten.embedding.default, always=True)
def embedding(ctx: Context, weight: Value, indices: Value, *args: Any, **kwargs: Any) -> Any:
    """A table lookup is rowwise in its ids; a lookup in user rows starts a broadcast."""
    if isinstance(weight, Uniform):
        if isinstance(indices, Broadcast):
            return indices.with_node(ctx.call(ctx.op, weight, indices.node, *args, **kwargs))
        if isinstance(indices, Concat):
            parts = [ctx.apply(ctx.op, weight, part, *args, **kwargs) for part in indices.parts]
            return join(parts, indices.dim)
    elif isinstance(indices, Full) and len(indices.shape) == 1:
        result = read_rows(ctx, weight, 0, indices.node)
        if result is not None:
            return result
    return ctx.materialized(weight, indices, *args, **kwargs)


@rule(aten.index.Tensor, always=True)
def index(ctx: Context, x: Value, indices: Sequence[Value | None]) -> Any:
    """`x[idx]` with one integer index along one axis; other forms pick from other axes."""
    used = [d for d, i in enumerate(indices) if i is not None]
    picks = [i for i in indices if i is not None]
    if len(used) == 1 and picks[0].dtype in INTEGERS and len(picks[0].shape) == 1:
        dim, pick = used[0], picks[0]
        if isinstance(pick, Full) and not isinstance(pick, Uniform):
            result = read_rows(ctx, x, dim, pick.node, wraps=True)
            if result is not None:
                return result
        if isinstance(x, Uniform) and isinstance(pick, Broadcast):
            return pick.with_node(ctx.call(ctx.op, x, [*[None] * dim, pick.node]), dim=dim)
    if isinstance(x, Uniform) and used == [0] and isinstance(picks[0], Broadcast) and picks[0].dtype in INTEGERS:
        return picks[0].with_node(ctx.call(ctx.op, x, [picks[0].node]))
    contiguous = used == list(range(used[0], used[-1] + 1))
    plain = all(isinstance(p, Full) and p.dtype in INTEGERS and not _has_rows(ctx, p) for p in picks)
    if isinstance(x, Broadcast) and x.dim not in used and contiguous and plain:
        rank = max(len(p.shape) for p in picks)
        shift = rank - len(used) if x.dim > used[-1] else 0
        return x.with_node(ctx.call(ctx.op, x.node, list(indices)), dim=x.dim + shift)
    return ctx.materialized(x, indices)


def _has_rows(ctx: Context, value: Value) -> bool:
    return any(ctx.is_dynamic(size) for size in value.shape)


@rule(aten.gather.default, always=True)
def gather(ctx: Context, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Any:
    """Rowwise where both share their rows; an index that is one row, expanded, starts a broadcast."""
    at = normalize_dim(dim, len(x.shape))
    if isinstance(index, Broadcast) and index.map.is_expand and isinstance(x, Full) and not isinstance(x, Uniform):
        # gather(x [U, D], 0, idx[:, None].expand(B, D)) reads whole rows.
        node = index.node
        others = [d for d in range(len(x.shape)) if d != at]
        if all(shape_of(node)[d] == 1 for d in others) and all(index.shape[d] == x.shape[d] for d in others):
            flat = ctx.call(aten.flatten.using_ints, node, 0, -1)
            result = read_rows(ctx, x, at, flat)
            if result is not None:
                return result
    if isinstance(x, Broadcast) and isinstance(index, Broadcast) and not index.map.is_expand:
        level = shared_level([x, index])
        if level is not None and x.dim == index.dim and x.dim != at and not x.map.is_expand:
            return level.value(ctx.call(ctx.op, at_level(ctx, x, level), at, at_level(ctx, index, level)))
    if isinstance(x, Broadcast) and at != x.dim and x.dim == 0 and at == 1 and x.mult == 1:
        result = composed_gather(ctx, x, index)
        if result is not None:
            return result
    return ctx.materialized(x, dim, index, sparse_grad=sparse_grad)


@rewrite("IKB110", "broadcast-before-gather", status="preview")
def composed_gather(ctx: Context, x: Broadcast, index: Value) -> Any:
    """Top-k rows of a user's history, chosen per candidate (SIM, ETA).

    before:  gather(history[idx], 1, top[:, :, None].expand(-1, -1, D))     history [U, L, D]   top [B, K]
    after:   history.flatten(0, 1)[idx[:, None] * L + top]
    Valid when: the index is the same for every entry of the trailing axes.
    Saves: the [B, L, D] copy of the history; only the K chosen rows are read.
    Numerics: the same values.
    Source: SIM (arXiv 2006.05639), ETA (arXiv 2108.04468); In-Kernel Broadcast Optimization (Meta, 2026).
    """
    ndim = len(x.shape)
    if ndim == 3 and isinstance(index, Broadcast) and isinstance(index.map.steps[0], Expand) and index.dim == 2:
        if index.shape[2] != x.shape[2] or shape_of(index.node)[2] != 1 or len(index.map.steps) != 1:
            return None
        picks = ctx.call(aten.squeeze.dim, index.node, 2)
    elif ndim == 2 and isinstance(index, Full):
        picks = index.node
    else:
        return None
    if not ctx.allow("IKB110", x):
        return None
    length = ctx.size(x.node, 1)
    rows = ctx.lift(ctx.call(aten.arange.default, ctx.size(x.node, 0), device=val(picks).device), x.map.steps, 0)
    base = ctx.call(aten.mul.Tensor, ctx.call(aten.unsqueeze.default, rows, 1), length)
    positions = ctx.call(aten.add.Tensor, base, picks)
    flat = ctx.call(aten.flatten.using_ints, x.node, 0, 1)
    return Full(ctx.call(aten.index.Tensor, flat, [positions]))


@rule(aten.repeat_interleave.self_int, always=True)
def repeat_interleave(ctx: Context, x: Value, repeats: Any, dim: int | None = None, *, output_size: Any = None) -> Any:
    """Every row a fixed number of times."""
    if not isinstance(x, Full) or dim is None:
        return ctx.materialized(x, repeats, dim, output_size=output_size)
    at = normalize_dim(dim, len(x.shape))
    rows = x.shape[at] * hint(repeats)
    source = "" if ctx.is_constant(x) else ctx.origin
    if x.shape[at] == 1:
        return Broadcast(x.node, Map((ctx.expand_step(repeats, rows),)), at, source=source)
    step = ctx.repeat_step(repeats, rows, ctx.size(x.node, at))
    return Broadcast(x.node, Map((step,)), at, source=source)


@rule(aten.repeat_interleave.self_Tensor, always=True)
def repeat_interleave_tensor(
    ctx: Context, x: Value, repeats: Value, dim: int | None = None, *, output_size: Any = None
) -> Any:
    """Every row a number of times of its own: the repeats are turned into an index once."""
    if not isinstance(x, Full) or isinstance(x, Uniform) or dim is None or not isinstance(repeats, Full):
        return ctx.materialized(x, repeats, dim, output_size=output_size)
    at = normalize_dim(dim, len(x.shape))
    rows = ctx.plan(
        ("repeats", repeats.node),
        lambda: ctx.call_sized(
            aten.repeat_interleave.Tensor,
            (ctx.output_size(at),),
            torch.int64,
            repeats,
            output_size=output_size,
        ),
    )
    return read_rows(ctx, x, at, rows) or ctx.materialized(x, repeats, dim, output_size=output_size)


@rule(aten.embedding_bag.padding_idx, aten.embedding_bag.default, aten._embedding_bag.default)
def embedding_bag(ctx: Context, weight: Value, indices: Value, offsets: Value, *args: Any, **kwargs: Any) -> Any:
    """Bags of equal length stay rows: `embedding_bag(ids [B, L])` is exported with offsets 0, L, 2 L, ..."""
    mult = indices.mult if isinstance(indices, Broadcast) else 0
    if (
        isinstance(weight, Uniform)
        and isinstance(indices, Broadcast)
        and indices.dim == 0
        and isinstance(offsets, Full)
        and _is_regular(offsets.node, mult)
        and not any(isinstance(arg, (Broadcast, Concat, Sum)) for arg in (*args, *kwargs.values()))
    ):
        total = ctx.size(indices.node, 0)
        regular = ctx.call(aten.arange.start_step, 0, total, mult, dtype=offsets.dtype, device=val(offsets.node).device)
        outputs = ctx.call(ctx.op, weight, indices.node, regular, *args, **kwargs)
        return [indices.with_node(outputs[0], mult=1), *(Full(item) for item in outputs[1:])]
    return ctx.materialized(weight, indices, offsets, *args, **kwargs)


def _is_regular(offsets: Node, step: int) -> bool:
    """Whether a node is `arange(0, n, step)`."""
    if not isinstance(offsets, fx.Node):
        return bool((offsets == torch.arange(len(offsets)) * step).all())
    return bool(offsets.target is aten.arange.start_step and offsets.args[0] == 0 and offsets.args[2] == step)
