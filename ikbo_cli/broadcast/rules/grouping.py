"""Grouping candidates by user: one batched op a group instead of a copy of the user's rows a candidate.

Rows are put into *blocks* of `T` rows of one user each; there are at most `B // T + U` blocks, a bound from sizes
alone, so nothing is read back to the host and the program exports, compiles and captures in a CUDA graph. Padding
slots are zero and are never read back. The layout depends on the index alone and is computed once a request.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch

from ikbo_cli.broadcast.context import Context
from ikbo_cli.broadcast.maps import Expand, Gather, Repeat
from ikbo_cli.broadcast.registry import rewrite
from ikbo_cli.broadcast.values import Broadcast, Concat, Full, Node, Value, shape_of, val

aten = torch.ops.aten

BLOCKS_PER_USER = 2
"""Blocks an average user's candidates fill: more waste less padding, fewer copy less of the user's rows."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where each candidate row goes: `slot` [B] among `slots = blocks * block_rows`, `user_of_block` [blocks]."""

    slot: Node
    user_of_block: Node
    blocks: Any
    block_rows: Any
    slots: Any


def make_plan(ctx: Context, index: Node, users: Any) -> Plan:
    """Emit the plan for an index `[B]` over `users` rows."""
    batch = ctx.size(index, 0)
    # T >= 2 for every B and U, U = 0 included: export would fix the program to "T is 1" or "is not 1" otherwise.
    per_user = ctx.call(operator.add, ctx.call(operator.mul, users, BLOCKS_PER_USER), 1)
    rows = ctx.call(operator.add, ctx.call(operator.floordiv, batch, per_user), 2)
    blocks = ctx.call(operator.add, ctx.call(operator.floordiv, batch, rows), users)
    device = val(index).device
    long = {"dtype": torch.int64, "device": device}
    index = ctx.cast(index, torch.int64)
    ones = ctx.call(aten.ones_like.default, index)
    counts = ctx.call(aten.index_add.default, ctx.call(aten.zeros.default, [users], **long), 0, index, ones)
    needed = ctx.call(
        aten.floor_divide.default, ctx.call(aten.add.Tensor, counts, ctx.call(operator.sub, rows, 1)), rows
    )
    last_block = ctx.call(aten.cumsum.default, needed, 0)
    first_block = ctx.call(aten.sub.Tensor, last_block, needed)
    first_row = ctx.call(aten.sub.Tensor, ctx.call(aten.cumsum.default, counts, 0), counts)
    order = ctx.call(aten.argsort.stable, index, stable=True)
    user = ctx.call(aten.index_select.default, index, 0, order)
    position = ctx.call(
        aten.sub.Tensor,
        ctx.call(aten.arange.default, batch, **long),
        ctx.call(aten.index_select.default, first_row, 0, user),
    )
    start = ctx.call(aten.mul.Tensor, ctx.call(aten.index_select.default, first_block, 0, user), rows)
    sorted_slot = ctx.call(aten.add.Tensor, start, position)
    slots = ctx.call(operator.mul, blocks, rows)
    slot = ctx.call(aten.index_copy.default, ctx.call(aten.zeros_like.default, index), 0, order, sorted_slot)
    block = ctx.call(aten.arange.default, blocks, **long)
    owner = ctx.call(aten.searchsorted.Tensor, last_block, block, right=True)
    user_of_block = ctx.call(aten.clamp.default, owner, 0, ctx.call(operator.sub, users, 1))
    return Plan(slot, user_of_block, blocks, rows, slots)


@dataclasses.dataclass(frozen=True)
class Groups:
    """Candidates folded by user along axis 0, for one map."""

    ctx: Context
    value: Broadcast
    plan: Plan | None

    def fold(self, node: Node) -> Node:
        """`[B, ...] -> [G, T, ...]`."""
        ctx = self.ctx
        if self.plan is not None:
            shape = shape_of(node)
            rest = [_size(ctx, node, d, shape[d]) for d in range(1, len(shape))]
            empty = ctx.call(aten.new_zeros.default, node, [self.plan.slots, *rest])
            packed = ctx.call(aten.index_copy.default, empty, 0, self.plan.slot, node)
            return ctx.call(aten.unflatten.int, packed, 0, [self.plan.blocks, self.plan.block_rows])
        return ctx.call(aten.unflatten.int, node, 0, self._even())

    def unfold(self, node: Node) -> Node:
        """`[G, T, ...] -> [B, ...]`."""
        ctx = self.ctx
        flat = ctx.call(aten.flatten.using_ints, node, 0, 1)
        return flat if self.plan is None else ctx.call(aten.index_select.default, flat, 0, self.plan.slot)

    def members(self, node: Node) -> Node:
        """The user rows of each group: `[U, ...] -> [G, ...]`."""
        if self.plan is None:
            return node
        return self.ctx.call(aten.index_select.default, node, 0, self.plan.user_of_block)

    def _even(self) -> list[Any]:
        step = self.value.map.steps[-1]
        if isinstance(step, Expand):
            return [1, step.size]
        assert isinstance(step, Repeat)
        return [self.ctx.size(self.value.node, 0), step.times]


def group(ctx: Context, value: Broadcast) -> Groups | None:
    """Groups for a value whose candidate axis is 0, or None where its map cannot be grouped."""
    if value.dim != 0 or value.mult != 1 or len(value.map.steps) != 1:
        return None
    match value.map.steps[0]:
        case Gather(index=index, wraps=wraps) as step:
            users = ctx.size(value.node, 0)
            plan = ctx.plan(
                ("groups", step),
                lambda: make_plan(ctx, _wrapped(ctx, index, users) if wraps else index, users),
            )
            return Groups(ctx, value, plan)
        case Expand() | Repeat():
            return Groups(ctx, value, None)
        case _:
            return None


def _wrapped(ctx: Context, index: Node, users: Any) -> Node:
    """`x[index]` counts negative rows from the end; grouping needs them non-negative."""
    from_end = ctx.call(aten.add.Tensor, index, users)
    return ctx.call(aten.where.self, ctx.call(aten.lt.Scalar, index, 0), from_end, index)


def at_last_step(ctx: Context, value: Broadcast) -> Broadcast:
    """The same value one step above the candidates: only its finest gather is left to do."""
    if len(value.map.steps) == 1:
        return value
    node = ctx.lift(value.node, value.map.steps[:-1], value.dim, value.mult)
    return dataclasses.replace(value, node=node, map=type(value.map)(value.map.steps[-1:]), moved=True)


@rewrite("IKB104", "broadcast-before-bmm", status="stable")
def grouped_matmul(ctx: Context, a: Value, b: Value) -> Any:
    """A batched product of candidate rows with the matrix of their user (`q @ k.T`, `attn @ v`, dot products).

    before:  bmm(q, k_user[idx])                q [B, S, D]   k_user [U, D, L]
    after:   one product a group of candidates of the same user: [T * S, D] @ [D, L]
    Valid when: the candidate axis is the first batch axis of both operands.
    Saves: the [B, D, L] copy of the user matrix; the product runs on full tiles also at S = 1.
    Numerics: the same dot products.
    Source: In-Kernel Broadcast Optimization (Meta, 2026), target attention.
    """
    if len(a.shape) != len(b.shape) or len(a.shape) < 3 or a.shape[:-2] != b.shape[:-2]:
        return None
    if isinstance(a, Broadcast) and not isinstance(b, (Broadcast, Concat)):
        swapped = grouped_matmul(ctx, _mt(ctx, b), _mt(ctx, a))
        return None if swapped is None else ctx.apply(aten.transpose.int, swapped, -2, -1)
    if not isinstance(b, Broadcast) or isinstance(a, Broadcast) or b.dim != 0 or len(b.map.steps) == 0:
        return None
    heads = b.mult
    ndim = len(a.shape)
    if heads != 1 and ndim != 3:
        return None
    last = at_last_step(ctx, b)
    node = last.node
    if heads != 1:
        node = ctx.split_rows(node, 0, heads)
    flat = dataclasses.replace(last, node=node, mult=1)
    if not isinstance(flat.map.steps[0], (Gather, Expand, Repeat)):
        return None
    if not ctx.allow("IKB104", b):
        return None
    groups = group(ctx, flat)
    if groups is None:
        return None
    rows = ctx.materialize(a)
    if heads != 1:
        rows = ctx.split_rows(rows, 0, heads)
    # [G, T, *batch, S, D] -> [G, *batch, T * S, D]
    folded = groups.fold(rows)
    rank = len(shape_of(folded))
    batch = list(range(2, rank - 2))
    packed = permuted(ctx, folded, [0, *batch, 1, rank - 2, rank - 1])
    sizes = shape_of(folded)
    width = sizes[rank - 2]
    packed = ctx.call(aten.flatten.using_ints, packed, rank - 3, rank - 2)
    product = ctx.call(aten.matmul.default, packed, groups.members(node))
    # [G, *batch, T * S, L] -> [G, T, *batch, S, L]
    rows_per_group = ctx.size(folded, 1)
    split = ctx.call(aten.unflatten.int, product, rank - 3, [rows_per_group, _size(ctx, folded, rank - 2, width)])
    back = permuted(ctx, split, [0, rank - 3, *range(1, rank - 3), rank - 2, rank - 1])
    out = groups.unfold(back)
    if heads != 1:
        out = ctx.call(aten.flatten.using_ints, out, 0, 1)
    return Full(out)


def permuted(ctx: Context, node: Node, order: Sequence[int]) -> Node:
    """The node with its axes in another order."""
    return node if list(order) == list(range(len(order))) else ctx.call(aten.permute.default, node, list(order))


def _size(ctx: Context, node: Node, dim: int, size: int) -> Any:
    return ctx.size(node, dim) if ctx.is_dynamic(size) else size


def _mt(ctx: Context, x: Value) -> Any:
    return ctx.apply(aten.transpose.int, x, -2, -1)
