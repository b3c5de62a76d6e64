"""Pointwise ops: compact while every operand agrees on the rows, lazily added, or gathered as late as possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ikbo_cli.broadcast.context import MATERIALIZED, Context
from ikbo_cli.broadcast.levels import at_level, shared_level
from ikbo_cli.broadcast.registry import rewrite, rule
from ikbo_cli.broadcast.values import (
    Broadcast,
    Concat,
    Full,
    Scalar,
    Sum,
    Uniform,
    Value,
    broadcasts_in,
    is_tensor,
)

aten = torch.ops.aten

UNARY = [
    aten.abs.default, aten.acos.default, aten.acosh.default, aten.asin.default, aten.asinh.default,
    aten.atan.default, aten.atanh.default, aten.bitwise_not.default, aten.ceil.default, aten.celu.default,
    aten.clamp.default, aten.clamp_max.default, aten.clamp_min.default, aten.cos.default, aten.cosh.default,
    aten.deg2rad.default, aten.digamma.default, aten.elu.default, aten.erf.default, aten.erfc.default,
    aten.exp.default, aten.exp2.default, aten.expm1.default, aten.fix.default, aten.floor.default,
    aten.frac.default, aten.gelu.default, aten.hardshrink.default, aten.hardsigmoid.default,
    aten.hardswish.default, aten.hardtanh.default, aten.isfinite.default, aten.isinf.default,
    aten.isnan.default, aten.leaky_relu.default, aten.lgamma.default, aten.log.default, aten.log10.default,
    aten.log1p.default, aten.log2.default, aten.log_sigmoid.default, aten.logical_not.default,
    aten.logit.default, aten.mish.default, aten.nan_to_num.default, aten.neg.default, aten.negative.default,
    aten.positive.default, aten.rad2deg.default, aten.reciprocal.default, aten.relu.default,
    aten.relu6.default, aten.round.default, aten.round.decimals, aten.rsqrt.default, aten.selu.default,
    aten.sigmoid.default, aten.sign.default, aten.signbit.default, aten.silu.default, aten.sin.default,
    aten.sinc.default, aten.sinh.default, aten.softplus.default, aten.softshrink.default, aten.sqrt.default,
    aten.square.default, aten.tan.default, aten.tanh.default, aten.threshold.default, aten.trunc.default,
    aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default,
    aten.bitwise_and.Scalar, aten.bitwise_or.Scalar,
    aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar,
    aten.pow.Tensor_Scalar, aten.remainder.Scalar, aten.fmod.Scalar, aten.floor_divide.Scalar,
    aten.__and__.Scalar, aten.__or__.Scalar, aten.clone.default, aten.alias.default, aten.detach.default,
    aten.lift_fresh_copy.default, aten.contiguous.default, aten.full_like.default, aten.zeros_like.default,
    aten.ones_like.default, aten.rsub.Scalar, aten.sub.Scalar, aten.add.Scalar, aten.true_divide.Scalar,
]  # fmt: skip

NARY = [
    aten.pow.Tensor_Tensor, aten.pow.Scalar, aten.atan2.default, aten.maximum.default, aten.minimum.default,
    aten.fmax.default, aten.fmin.default, aten.max.other, aten.min.other, aten.remainder.Tensor,
    aten.remainder.Scalar_Tensor, aten.fmod.Tensor, aten.floor_divide.default, aten.hypot.default,
    aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor,
    aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default, aten.bitwise_and.Tensor,
    aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor, aten.__and__.Tensor, aten.__or__.Tensor,
    aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.lerp.Tensor, aten.lerp.Scalar,
    aten.addcmul.default, aten.addcdiv.default, aten.clamp.Tensor, aten.clamp_min.Tensor,
    aten.clamp_max.Tensor, aten.mul.Scalar, aten.div.Scalar, aten.mul.Tensor, aten.div.Tensor,
    aten.multiply.Tensor, aten.divide.Tensor, aten.true_divide.Tensor, aten.div.Tensor_mode,
    aten.div.Scalar_mode, aten.copy.default, aten.dropout.default,
    aten.alpha_dropout.default, aten.feature_dropout.default, aten.xlogy.Tensor,
]  # fmt: skip


@rule(*UNARY, *NARY)
def pointwise(ctx: Context, *args: Any, **kwargs: Any) -> Any:
    """Runs where the operands meet: compact, per part of a concat, per term of a sum, or on gathered rows."""
    operands = [arg for arg in args if is_tensor(arg)]
    level = shared_level(operands)
    if level is not None:
        return level.value(ctx.call(ctx.op, *(at_level(ctx, arg, level) for arg in args), **kwargs))
    parts = split_like_concat(ctx, args)
    if parts is not None:
        dim, pieces = parts
        return join([ctx.apply(ctx.op, *piece, **kwargs) for piece in pieces], dim)
    if ctx.op in LINEAR_SCALE and isinstance(args[0], Sum) and not any(is_tensor(arg) for arg in args[1:]):
        total = args[0]
        return dataclasses.replace(
            total, terms=tuple(ctx.apply(ctx.op, term, *args[1:], **kwargs) for term in total.terms)
        )
    return mix(ctx, *args, **kwargs)


LINEAR_SCALE = (aten.neg.default, aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)


def split_like_concat(ctx: Context, args: Sequence[Any]) -> tuple[int, list[list[Any]]] | None:
    """Split all operands along the parts of a `Concat` operand: its axis, and the arguments part by part.

    None where another operand varies along that axis and is no parameter: then nothing is gained by parts.
    """
    concat = next((arg for arg in args if isinstance(arg, Concat)), None)
    if concat is None:
        return None
    ndim = max(len(arg.shape) for arg in args if is_tensor(arg))
    axis = len(concat.shape) - concat.dim
    if len(concat.shape) != ndim:
        return None
    offsets = [sum(concat.widths[:i]) for i in range(len(concat.parts))]
    pieces: list[list[Any]] = [[] for _ in concat.parts]
    for arg in args:
        if isinstance(arg, Concat) and len(arg.shape) - arg.dim == axis and arg.widths == concat.widths:
            options: Sequence[Any] = arg.parts
        elif not is_tensor(arg) or len(arg.shape) < axis or arg.shape[-axis] == 1:
            options = [arg] * len(pieces)
        elif isinstance(arg, (Uniform, Broadcast)):
            dim = len(arg.shape) - axis
            options = [
                ctx.apply(aten.slice.Tensor, arg, dim, start, start + width)
                for start, width in zip(offsets, concat.widths, strict=True)
            ]
        else:
            return None
        for piece, option in zip(pieces, options, strict=True):
            piece.append(option)
    return concat.dim, pieces


def join(parts: Sequence[Value], dim: int) -> Value:
    """A `Concat` of parts (flattened where a part is one along the same axis), or the single part itself."""
    flat: list[Value] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Concat) and part.dim == dim else [part])
    return flat[0] if len(flat) == 1 else Concat(tuple(flat), dim)


@rewrite("IKB107", "broadcast-before-pointwise", status="stable")
def mix(ctx: Context, *args: Any, **kwargs: Any) -> Any:
    """User and candidate values meet in a pointwise op (a product, a mask, a late join).

    before:  f(tower(x_user[idx]), x_cand)        tower runs on B rows
    after:   f(tower(x_user)[idx], x_cand)        tower runs on U rows; one gather right where the rows are read
    Valid when: always; `f` reads each row on its own.
    Saves: all of the tower's work on B - U rows. A compiler fuses the gather into `f`.
    Numerics: the same operations on the same values.
    Source: In-Kernel Broadcast Optimization (Meta, 2026), late broadcast.
    """
    operands = [arg for arg in args if is_tensor(arg)]
    if any(b.moved for b in broadcasts_in(operands)):
        ctx.allow("IKB107", *operands, optional=False)
    else:
        ctx.refuse(MATERIALIZED)
    shape = torch.broadcast_shapes(*(arg.shape for arg in operands))
    expanded = [isinstance(arg, Broadcast) and arg.map.is_expand for arg in args]
    keep = [arg for arg, lazy in zip(args, expanded, strict=True) if is_tensor(arg) and not lazy]
    free = bool(keep) and tuple(torch.broadcast_shapes(*(k.shape for k in keep))) == tuple(shape)
    nodes = [
        (ctx.operand(arg, shape) if free or not lazy else ctx.materialize(arg)) if is_tensor(arg) else arg
        for arg, lazy in zip(args, expanded, strict=True)
    ]
    return ctx.wrap(ctx.call(ctx.op, *nodes, **kwargs))


@rule(aten.add.Tensor, aten.sub.Tensor, aten.subtract.Tensor)
def add(ctx: Context, x: Any, y: Any, *, alpha: Any = 1) -> Any:
    """Addition of values on different rows is postponed, so that each side can go on being computed alone."""
    sign = -1 if ctx.op in (aten.sub.Tensor, aten.subtract.Tensor) else 1
    operands = [arg for arg in (x, y) if is_tensor(arg)]
    dtypes = {operand.dtype for operand in operands}
    if not is_tensor(x) or len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point or alpha != 1:
        return pointwise(ctx, x, y, alpha=alpha) if alpha != 1 else pointwise(ctx, x, y)
    if shared_level(operands) is not None or any(isinstance(arg, Concat) for arg in operands):
        return pointwise(ctx, x, y)
    right = (
        ctx.apply(aten.neg.default, y)
        if sign < 0 and is_tensor(y)
        else (-y if sign < 0 and not isinstance(y, Scalar) else y)
    )
    if isinstance(right, Scalar):
        return pointwise(ctx, x, y)
    return add_terms(ctx, [*_terms(x), *_terms(right)], x.dtype)


def _terms(value: Any) -> list[Any]:
    return list(value.terms) if isinstance(value, Sum) else [value]


def add_terms(ctx: Context, terms: Sequence[Any], dtype: torch.dtype) -> Value:
    """A `Sum` of terms with everything added that can be added compactly: one term a level, and one `Full` term.

    Numbers and parameters go into a compact term where there is one.
    """
    merged: list[Any] = []
    for term in sorted(terms, key=_rank):
        for position, other in enumerate(merged):
            if _mergeable(other, term):
                merged[position] = ctx.apply(aten.add.Tensor, other, term)
                break
        else:
            merged.append(term)
    values = [term for term in merged if is_tensor(term)]
    return values[0] if len(values) == 1 else Sum(tuple(values), dtype)


def _rank(term: Any) -> int:
    """Compact terms first, so that what comes later can be added to them."""
    if isinstance(term, Broadcast):
        return 1 if term.map.is_expand else 0
    return 3 if isinstance(term, Uniform) else 2 if is_tensor(term) else 4


def _mergeable(left: Any, right: Any) -> bool:
    if not is_tensor(right):
        return is_tensor(left)
    if isinstance(left, Broadcast):
        level = shared_level([left, right])
        return level is not None and (isinstance(right, Broadcast) or _within(right, left))
    return isinstance(left, Full) and isinstance(right, Full)


def _within(small: Value, large: Value) -> bool:
    return tuple(torch.broadcast_shapes(small.shape, large.shape)) == large.shape


@rule(aten.type_as.default)
def type_as(ctx: Context, x: Value, other: Value) -> Any:
    """Only the dtype of the other operand matters."""
    return ctx.apply(aten.to.dtype, x, other.dtype)


@rule(aten.bucketize.Tensor, aten.isin.Tensor_Tensor)
def elementwise_lookup(ctx: Context, x: Value, table: Value, *args: Any, **kwargs: Any) -> Any:
    """Each element is looked up in a table that has no rows."""
    if isinstance(x, Broadcast) and isinstance(table, Full):
        return x.with_node(ctx.call(ctx.op, x.node, table, *args, **kwargs))
    return ctx.materialized(x, table, *args, **kwargs)


@rule(aten.prelu.default, aten._prelu_kernel.default)
def prelu(ctx: Context, x: Value, weight: Value) -> Any:
    """The weight lies along axis 1, and acts on every part of a concat alone."""
    if isinstance(x, Broadcast) and isinstance(weight, Uniform) and x.dim != 1:
        return x.with_node(ctx.call(ctx.op, x.node, weight))
    if isinstance(x, Concat) and isinstance(weight, Uniform):
        if weight.shape[0] == 1:
            weights: list[Any] = [weight] * len(x.parts)
        elif x.dim == 1:
            starts = [sum(x.widths[:i]) for i in range(len(x.parts))]
            weights = [
                ctx.apply(aten.slice.Tensor, weight, 0, start, start + width)
                for start, width in zip(starts, x.widths, strict=True)
            ]
        else:
            weights = [weight] * len(x.parts)
        return join([ctx.apply(ctx.op, part, w) for part, w in zip(x.parts, weights, strict=True)], x.dim)
    return ctx.materialized(x, weight)
