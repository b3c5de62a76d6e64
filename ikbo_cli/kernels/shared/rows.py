"""Gathers of user rows by candidate, and their sums back: plain aten, the same on every device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of partial sums: float32, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def segment_sums(rows: Tensor, index: Tensor, users: int) -> Tensor:
    """Sum of the rows of each user, in candidate order within a user: deterministic on every device.

    Args:
        rows: `[B, ...]`, float32 or float64.
        index: `[B]`, int32 or int64; rows of users outside `[0, users)` are left out.
        users: `U`.

    Returns:
        `[U, ...]`, dtype of `rows`.
    """
    if not rows.is_cuda:
        return rows.new_zeros((users, *rows.shape[1:])).index_add(0, index, rows)
    keys, order = torch.sort(index.long(), stable=True)
    bounds = torch.searchsorted(keys, torch.arange(users + 1, device=index.device))
    flat = rows.index_select(0, order).flatten(1)
    sums = torch.segment_reduce(flat, "sum", offsets=bounds, axis=0, unsafe=True)
    return sums.reshape(users, *rows.shape[1:])


class _GatherRows(torch.autograd.Function):
    """`table[index]` whose gradient is a sum in a fixed order (index_select's uses float atomics on CUDA)."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.users = table.shape[0]
        ctx.dtype = table.dtype
        return _gather(table, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        wide = grads[0].to(accumulate_dtype(grads[0].dtype))
        return segment_sums(wide, index, ctx.users).to(ctx.dtype), None


def _gather(table: Tensor, index: Tensor) -> Tensor:
    if not table.is_cuda:
        return table.index_select(0, index)
    users = table.shape[0]
    outside = ((index < 0) | (index >= users)).reshape(-1, *[1] * (table.ndim - 1))
    if statically_known_true(users == 0):
        return table.new_full((index.shape[0], *table.shape[1:]), float("nan"))
    rows = table.index_select(0, index.clamp(0, users - 1))
    return rows.masked_fill(outside, float("nan"))


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows of a user table, one per candidate.

    An index out of range raises IndexError on the CPU; on a GPU, where raising would make the host wait,
    its row is NaN.

    Args:
        table: `[U, ...]`, any float dtype.
        index: `[B]`, int32 or int64.

    Returns:
        `[B, ...]`, dtype of `table`.
    """
    return _GatherRows.apply(table, index) if table.requires_grad else _gather(table, index)  # type: ignore[no-untyped-call]


def size_hint(size: int) -> int:
    """A size as a plain number, for choices that must not add a guard to the traced program.

    A symbolic size answers with the value it was traced with, or 1024 where it has none.
    """
    if isinstance(size, int):
        return size
    return int(size.node.hint) if getattr(size, "node", None) is not None and size.node.hint else 1024


def is_eager(tensor: Tensor) -> bool:
    """Whether a tensor holds data now (not a fake or functional one under a tracer)."""
    return type(tensor) in (Tensor, torch.nn.Parameter)
