"""Sizes and constants: what the program computes from the length of the batch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from ikbo_cli.broadcast.context import Context
from ikbo_cli.broadcast.maps import Map
from ikbo_cli.broadcast.registry import rule
from ikbo_cli.broadcast.values import Broadcast, Concat, Full, Scalar, Sum, Value, hint, normalize_dim

aten = torch.ops.aten


@rule(aten.sym_size.int)
def sym_size(ctx: Context, x: Value, dim: int) -> Any:
    """The size the *original* tensor has: sizes live in both worlds."""
    at = normalize_dim(dim, len(x.shape))
    match x:
        case Broadcast(dim=candidate, mult=mult) if candidate == at:
            rows = ctx.rows(x.map)
            return _scalar(rows if mult == 1 else ctx.call(operator.mul, rows, mult))
        case Broadcast():
            return _scalar(ctx.size(x.node, at))
        case Concat() if x.dim == at:
            total = sym_size_of(ctx, x.parts[0], at)
            for part in x.parts[1:]:
                total = ctx.call(operator.add, total, sym_size_of(ctx, part, at))
            return _scalar(total)
        case Concat():
            # A part that is merely expanded knows its size as well as any other.
            return ctx.apply(aten.sym_size.int, x.parts[0], at)
        case Sum():
            wide = next(
                term for term in x.terms
                if len(term.shape) >= len(x.shape) - at and term.shape[at - len(x.shape)] == x.shape[at]
            )  # fmt: skip
            return ctx.apply(aten.sym_size.int, wide, at - len(x.shape) + len(wide.shape))
        case _:
            return ctx.materialized(x, dim)


def sym_size_of(ctx: Context, x: Value, dim: int) -> Any:
    """The size as an argument of another op."""
    size = ctx.apply(aten.sym_size.int, x, dim)
    return size.node if isinstance(size, Scalar) else size


def _scalar(node: Any) -> Any:
    return node if isinstance(node, (int, Scalar)) else Scalar(node)


@rule(
    aten.zeros.default, aten.ones.default, aten.full.default, aten.new_zeros.default, aten.new_ones.default,
    aten.new_full.default, always=True,
)  # fmt: skip
def constant(ctx: Context, *args: Any, **kwargs: Any) -> Any:
    """A constant sized by the batch is one row, expanded."""
    at = 0 if isinstance(args[0], (list, tuple)) else 1
    size: Sequence[Any] = args[at]
    if at == 1 and isinstance(args[0], (Broadcast, Concat, Sum)):
        args = (_any_node(args[0]), *args[1:])  # only its dtype and device matter
    dim = next((d for d, s in enumerate(size) if isinstance(s, Scalar) and ctx.is_dynamic(s.hint)), None)
    if dim is None or not (ctx.op in (aten.zeros.default, aten.ones.default) or at == 1 or _plain_fill(args[at + 1])):
        return ctx.materialized(*args, **kwargs)
    one = [1 if d == dim else s for d, s in enumerate(size)]
    node = ctx.call(ctx.op, *args[:at], one, *args[at + 1 :], **kwargs)
    return Broadcast(node, Map((ctx.expand_step(size[dim], hint(size[dim])),)), dim)


def _plain_fill(fill: Any) -> bool:
    return isinstance(fill, (int, float, bool))


def _any_node(value: Value) -> Value:
    while isinstance(value, (Concat, Sum)):
        value = value.parts[0] if isinstance(value, Concat) else value.terms[0]
    return Full(value.node) if isinstance(value, Broadcast) else value
