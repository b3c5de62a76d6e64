"""Ops that work along some axes: compact unless along the candidate axis, part by part unless along the concat's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ikbo_cli.broadcast.context import Context
from ikbo_cli.broadcast.registry import rewrite, rule
from ikbo_cli.broadcast.rules.pointwise import add_terms, join
from ikbo_cli.broadcast.values import Broadcast, Concat, Full, Sum, Value, normalize_dim, normalize_dims

aten = torch.ops.aten


def along(
    ctx: Context, x: Value, touched: Sequence[int], args: Sequence[Any], kwargs: Any, *, drop: bool = False
) -> Any:
    """Run the current op, which works along `touched` axes, where `x` is compact or part by part.

    With `drop` the touched axes disappear from the result. Several results (topk, sort) all have the same axes.
    """
    if isinstance(x, (Broadcast, Concat)) and x.dim not in touched:
        dim = x.dim - (sum(d < x.dim for d in touched) if drop else 0)
        if isinstance(x, Concat):
            results = [ctx.apply(ctx.op, part, *args, **kwargs) for part in x.parts]
            if isinstance(results[0], list):
                return [join(column, dim) for column in zip(*results, strict=True)]
            return join(results, dim)
        node = ctx.call(ctx.op, x.node, *args, **kwargs)
        if isinstance(node, (list, tuple)):
            return [x.with_node(item, dim=dim) for item in node]
        return x.with_node(node, dim=dim)
    if isinstance(x, Broadcast):
        ctx.refuse(f"works along the candidate axis ({x.dim}): rows influence each other")
    return ctx.materialized(x, *args, **kwargs)


@rule(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.any.dim, aten.all.dim,
      aten.prod.dim_int, aten.logsumexp.default, aten.std.dim, aten.var.dim, aten.norm.ScalarOpt_dim,
      aten.linalg_vector_norm.default, aten.argmax.default, aten.argmin.default, aten.std.correction,
      aten.var.correction)  # fmt: skip
def reduce_dims(ctx: Context, x: Value, *args: Any, **kwargs: Any) -> Any:
    """A reduction stays compact unless it folds the candidate axis; sums go through concats and sums."""
    names = [arg.name for arg in ctx.op._schema.arguments[1:]]
    given = dict(zip(names, args, strict=False)) | kwargs
    dims = normalize_dims(given.get("dim"), len(x.shape))
    keepdim = bool(given.get("keepdim", False))
    linear = ctx.op in (aten.sum.dim_IntList, aten.mean.dim)
    if linear and isinstance(x, Concat) and x.dim in dims and x.dtype.is_floating_point and "dtype" not in given:
        return sum_over_concat(ctx, x, dims, keepdim)
    if linear and isinstance(x, Sum) and "dtype" not in given and all(t.shape == x.shape for t in x.terms):
        return add_terms(ctx, [ctx.apply(ctx.op, term, *args, **kwargs) for term in x.terms], x.dtype)
    return along(ctx, x, dims, args, kwargs, drop=not keepdim)


@rewrite("IKB108", "broadcast-before-sum", status="stable")
def sum_over_concat(ctx: Context, x: Concat, dims: Sequence[int], keepdim: bool) -> Any:
    """Sum or mean over user and candidate fields (wide parts, FM, field pooling).

    before:  cat([x_user[idx], x_cand], 1).sum(1)
    after:   x_user.sum(1)[idx] + x_cand.sum(1)
    Valid when: the reduction is linear (sum, mean) over the axis of the concat.
    Saves: the copy of the concat, and the user side of the sum on B - U rows.
    Numerics: the sum is split in two; 16-bit sums keep the compact partial sum in float32.
    Source: In-Kernel Broadcast Optimization (Meta, 2026); factorization machines (Rendle, 2010).
    """
    op = ctx.op
    if not ctx.allow("IKB108", x):
        return ctx.materialized(x, list(dims), keepdim)
    wide = x.dtype in (torch.float16, torch.bfloat16)
    terms = []
    for part in x.parts:
        kwargs = {"dtype": torch.float32} if wide and isinstance(part, Broadcast) else {}
        term = ctx.apply(aten.sum.dim_IntList, part, list(dims), keepdim, **kwargs)
        # The term belongs to this rewrite: reading it later is no site of its own.
        terms.append(dataclasses.replace(term, source="") if isinstance(term, Broadcast) else term)
    total = add_terms(ctx, terms, x.dtype)
    if op is aten.mean.dim:
        count = 1
        for d in dims:
            if ctx.is_dynamic(x.shape[d]):
                return ctx.materialized(x, list(dims), keepdim)
            count *= x.shape[d]
        return ctx.apply(aten.div.Tensor, total, count)
    return total


@rule(aten.max.dim, aten.min.dim, aten.median.dim, aten.mode.default, aten.cummax.default, aten.cummin.default)
def reduce_with_indices(ctx: Context, x: Value, *args: Any, **kwargs: Any) -> Any:
    """Value and position along one axis."""
    names = [arg.name for arg in ctx.op._schema.arguments[1:]]
    given = dict(zip(names, args, strict=False)) | kwargs
    scan = ctx.op in (aten.cummax.default, aten.cummin.default)
    drop = not scan and not given.get("keepdim", False)
    return along(ctx, x, [normalize_dim(given.get("dim", -1), len(x.shape))], args, kwargs, drop=drop)


@rule(aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten._log_softmax.default,
      aten.cumsum.default, aten.cumprod.default, aten.glu.default, aten._safe_softmax.default,
      aten.logcumsumexp.default)  # fmt: skip
def one_axis(ctx: Context, x: Value, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
    """Softmax, running sums: all along one axis."""
    return along(ctx, x, [normalize_dim(dim, len(x.shape))], [dim, *args], kwargs)


@rule(aten.topk.default)
def topk(ctx: Context, x: Value, k: Any, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
    """The k largest of every row."""
    return along(ctx, x, [normalize_dim(dim, len(x.shape))], [k, dim, *args], kwargs)


@rule(aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
def sort(ctx: Context, x: Value, *args: Any, **kwargs: Any) -> Any:
    """Every row sorted on its own."""
    names = [arg.name for arg in ctx.op._schema.arguments[1:]]
    given = dict(zip(names, args, strict=False)) | kwargs
    return along(ctx, x, [normalize_dim(given.get("dim", -1), len(x.shape))], args, kwargs)


@rule(aten.flip.default, aten.roll.default)
def move_along(ctx: Context, x: Value, shifts: Any, dims: Any = None, **kwargs: Any) -> Any:
    """Entries change places along some axes."""
    if ctx.op is aten.flip.default:
        return along(ctx, x, normalize_dims(shifts, len(x.shape)), [shifts], kwargs)
    if dims is None:
        return ctx.materialized(x, shifts)
    return along(ctx, x, normalize_dims(dims, len(x.shape)), [shifts, dims], kwargs)


@rule(aten.layer_norm.default, aten.rms_norm.default)
def last_axes_norm(ctx: Context, x: Value, normalized_shape: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    """Normalizes each row over its last axes."""
    ndim = len(x.shape)
    return along(ctx, x, range(ndim - len(normalized_shape), ndim), [normalized_shape, *args], kwargs)


@rule(aten.batch_norm.default)
def batch_norm(ctx: Context, x: Value, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *args: Any) -> Any:
    """In inference a scale and a shift a channel (axis 1); in training the rows influence each other."""
    if training:
        if isinstance(x, (Broadcast, Concat, Sum)):
            ctx.refuse("training-mode batch norm: rows influence each other (export the model after .eval())")
        return ctx.materialized(x, weight, bias, mean, var, training, *args)
    if isinstance(x, Broadcast) and x.dim != 1:
        return x.with_node(ctx.call(ctx.op, x.node, weight, bias, mean, var, training, *args))
    if isinstance(x, Concat):
        parts = []
        start = 0
        for part, width in zip(x.parts, x.widths, strict=True):
            stats: tuple[Any, ...] = (weight, bias, mean, var)
            if x.dim == 1:
                stats = tuple(
                    None if s is None else ctx.apply(aten.slice.Tensor, s, 0, start, start + width) for s in stats
                )
            parts.append(ctx.apply(ctx.op, part, *stats, training, *args))
            start += width
        return join(parts, x.dim)
    return ctx.materialized(x, weight, bias, mean, var, training, *args)


@rule(aten.group_norm.default, aten.instance_norm.default)
def group_norm(ctx: Context, x: Value, *args: Any, **kwargs: Any) -> Any:
    """Normalizes each row (axis 0) on its own."""
    if ctx.op is aten.instance_norm.default and args[4] is False:
        return ctx.materialized(x, *args, **kwargs)
    return along(ctx, x, range(1, len(x.shape)), args, kwargs)


@rule(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv1d.padding, aten.conv2d.padding,
      aten.max_pool1d.default, aten.max_pool2d.default, aten.avg_pool1d.default, aten.avg_pool2d.default,
      aten.adaptive_avg_pool1d.default, aten.adaptive_max_pool1d.default, aten.constant_pad_nd.default,
      aten.pad.default)  # fmt: skip
def rows_first(ctx: Context, x: Value, *args: Any, **kwargs: Any) -> Any:
    """Ops that treat axis 0 as rows and may mix all the others."""
    if ctx.op in (aten.constant_pad_nd.default, aten.pad.default):
        padded = range(len(x.shape) - len(args[0]) // 2, len(x.shape))
        return along(ctx, x, list(padded), args, kwargs)
    if isinstance(x, (Concat, Sum)) or any(isinstance(arg, (Broadcast, Concat, Sum)) for arg in args):
        return ctx.materialized(x, *args, **kwargs)
    pools_without_batch = {aten.max_pool1d.default: 2, aten.avg_pool1d.default: 2}
    if len(x.shape) == pools_without_batch.get(ctx.op, -1):
        return ctx.materialized(x, *args, **kwargs)
    return along(ctx, x, range(1, len(x.shape)), args, kwargs)


@rule(aten.one_hot.default)
def one_hot(ctx: Context, x: Value, *args: Any) -> Any:
    """A new last axis."""
    if isinstance(x, Broadcast):
        return x.with_node(ctx.call(ctx.op, x.node, *args))
    return ctx.materialized(x, *args)


@rule(aten.gru.input, aten.lstm.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def recurrent(ctx: Context, x: Value, hx: Any, params: Sequence[Value], *args: Any) -> Any:
    """A recurrent network reads each row's sequence alone; its initial state must have as many rows."""
    batch_first = bool(args[-1])
    states = [hx] if isinstance(hx, (Broadcast, Concat, Sum, Full)) else list(hx)
    batch = 0 if batch_first else 1
    ok = isinstance(x, Broadcast) and x.dim == batch and x.mult == 1 and len(x.shape) == 3
    if ok and isinstance(x, Broadcast) and all(_state_fits(state, x) for state in states):
        rows = ctx.size(x.node, batch)
        compact = []
        for state in states:
            assert isinstance(state, Broadcast)
            node = state.node
            if state.map.is_expand:
                node = ctx.call(aten.expand.default, node, [-1, rows, -1])
            compact.append(node)
        state_arg = compact if isinstance(hx, (list, tuple)) else compact[0]
        outputs = ctx.call(ctx.op, x.node, state_arg, list(params), *args)
        return [x.with_node(outputs[0]), *(x.with_node(item, dim=1) for item in outputs[1:])]
    return ctx.materialized(x, hx, params, *args)


def _state_fits(state: Value, x: Broadcast) -> bool:
    if not isinstance(state, Broadcast) or state.dim != 1 or state.mult != 1:
        return False
    return state.map.is_expand or state.map == x.map


@rule(aten.unfold.default)
def unfold(ctx: Context, x: Value, dimension: int, size: Any, step: Any) -> Any:
    """Sliding windows along one axis, added as a last axis."""
    at = normalize_dim(dimension, len(x.shape))
    if isinstance(x, Broadcast) and x.dim != at:
        return x.with_node(ctx.call(ctx.op, x.node, at, size, step))
    return ctx.materialized(x, dimension, size, step)


@rule(aten.tril.default, aten.triu.default)
def triangle(ctx: Context, x: Value, diagonal: int = 0) -> Any:
    """Works on the last two axes."""
    return along(ctx, x, range(len(x.shape) - 2, len(x.shape)), [diagonal], {})
