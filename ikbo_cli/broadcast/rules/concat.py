"""Concatenations stay unwritten: every part keeps its own rows until an op needs them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ikbo_cli.broadcast.context import Context
from ikbo_cli.broadcast.levels import shared_level, with_rows
from ikbo_cli.broadcast.registry import rule
from ikbo_cli.broadcast.rules.pointwise import join
from ikbo_cli.broadcast.values import Broadcast, Concat, Full, Sum, Value, normalize_dim

aten = torch.ops.aten


@rule(aten.cat.default, aten.concat.default, aten.concatenate.default)
def cat(ctx: Context, tensors: Sequence[Value], dim: int = 0) -> Any:
    """Compact when all parts share their rows, else unwritten; along the candidate axis it is written."""
    at = normalize_dim(dim, max(len(tensor.shape) for tensor in tensors))
    # Legacy: a one-dimensional empty tensor may be concatenated with anything.
    parts = [tensor for tensor in tensors if tensor.shape != (0,)] or list(tensors)
    if len({part.dtype for part in parts}) != 1 or any(_candidate_axis(part) == at for part in parts):
        return ctx.materialized(tensors, dim)
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, Broadcast) for part in parts):
        level = shared_level(parts)
        if level is not None:
            return level.value(ctx.call(aten.cat.default, [with_rows(ctx, part, level) for part in parts], at))
    return join(_merge_neighbours(ctx, join_parts(parts, at), at), at)


def join_parts(parts: Sequence[Value], dim: int) -> list[Value]:
    """The parts of nested concats along the same axis, in order."""
    return [p for part in parts for p in (part.parts if isinstance(part, Concat) and part.dim == dim else [part])]


def _merge_neighbours(ctx: Context, parts: Sequence[Value], dim: int) -> list[Value]:
    """Write neighbours that are ordinary, or repeat the same rows, together: fewer parts, no more bytes."""
    merged: list[Value] = []
    run: list[Value] = []

    def flush() -> None:
        if len(run) == 1:
            merged.append(run[0])
        elif run:
            level = shared_level(run) if isinstance(run[0], Broadcast) else None
            if level is not None:
                merged.append(level.value(ctx.call(aten.cat.default, [with_rows(ctx, p, level) for p in run], dim)))
            else:
                merged.append(ctx.apply(aten.cat.default, list(run), dim))
        run.clear()

    for part in parts:
        if run and not _alike(run[0], part):
            flush()
        run.append(part)
    flush()
    return merged


def _alike(left: Value, right: Value) -> bool:
    if isinstance(left, Broadcast) and isinstance(right, Broadcast):
        return (left.map, left.dim, left.mult) == (right.map, right.dim, right.mult)
    return isinstance(left, Full) and isinstance(right, Full)


def _candidate_axis(value: Value) -> int | None:
    return value.dim if isinstance(value, Broadcast) else None


@rule(aten.stack.default)
def stack(ctx: Context, tensors: Sequence[Value], dim: int = 0) -> Any:
    """A concat of one-long slices along a new axis."""
    at = normalize_dim(dim, len(tensors[0].shape) + 1)
    if any(isinstance(tensor, Sum) for tensor in tensors) and not any(
        isinstance(tensor, (Broadcast, Concat)) for tensor in tensors
    ):
        return ctx.materialized(tensors, dim)
    return ctx.apply(aten.cat.default, [ctx.apply(aten.unsqueeze.default, t, at) for t in tensors], at)
