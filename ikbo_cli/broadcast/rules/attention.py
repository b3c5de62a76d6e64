"""Scaled dot product attention: compact, or all candidates of a user as one query block."""

from __future__ import annotations

from typing import Any

import torch

from ikbo_cli.broadcast.context import Context
from ikbo_cli.broadcast.levels import shared_level, with_rows
from ikbo_cli.broadcast.registry import rewrite, rule
from ikbo_cli.broadcast.rules.grouping import at_last_step, group, permuted
from ikbo_cli.broadcast.values import Broadcast, Full, Value, shape_of

aten = torch.ops.aten


@rule(aten.scaled_dot_product_attention.default)
def sdpa(
    ctx: Context,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Any:
    """Attention keeps its batch axes; the last two belong to the product."""
    operands = [query, key, value] + ([attn_mask] if attn_mask is not None else [])
    level = shared_level(operands)
    if level is not None and level.axis > 2:
        nodes = [with_rows(ctx, operand, level) for operand in operands[:3]]
        mask = None if attn_mask is None else with_rows(ctx, attn_mask, level)
        return level.value(ctx.call(ctx.op, *nodes, mask, dropout_p, is_causal, **kwargs))
    if isinstance(query, Full) and isinstance(key, Broadcast) and isinstance(value, Broadcast):
        out = target_attention(ctx, query, key, value, attn_mask, dropout_p, is_causal, kwargs)
        if out is not None:
            return out
    return ctx.materialized(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)


@rewrite("IKB103", "broadcast-before-attention", status="stable")
def target_attention(
    ctx: Context, query: Value, key: Broadcast, value: Broadcast, mask: Any, dropout_p: float, is_causal: bool,
    kwargs: Any,
) -> Any:  # fmt: skip
    """Target attention: candidate queries over the keys and values of their user.

    before:  sdpa(q, k_user[idx], v_user[idx])      q [B, H, S, D]   k, v [U, H, L, D]
    after:   sdpa of groups [G, H, T * S, D] against [L, D]: all candidates of a user are one query block
    Valid when: the candidate axis is the first; not causal; the mask belongs to the user (or is folded with q).
    Saves: the copies of K and V, and runs full tiles at S = 1.
    Numerics: the same softmax over the same keys.
    Source: In-Kernel Broadcast Optimization (Meta, 2026), target attention.
    """
    if is_causal or dropout_p:
        ctx.refuse("causal attention or dropout cannot be folded by user")
        return None
    if key.map != value.map or key.dim or value.dim or key.mult != 1 or value.mult != 1 or len(query.shape) < 3:
        return None
    if not len(query.shape) == len(key.shape) == len(value.shape):
        return None
    if not ctx.allow("IKB103", key, value):
        return None
    k, v = at_last_step(ctx, key), at_last_step(ctx, value)
    groups = group(ctx, k)
    if groups is None:
        return None
    folded = groups.fold(ctx.materialize(query))
    rank = len(shape_of(folded))
    batch = list(range(2, rank - 2))
    packed = permuted(ctx, folded, [0, *batch, 1, rank - 2, rank - 1])
    packed = ctx.call(aten.flatten.using_ints, packed, rank - 3, rank - 2)
    folded_mask = None
    if mask is not None:
        folded_mask = _fold_mask(ctx, groups, k, mask, query)
        if folded_mask is None:
            ctx.refuse("the attention mask varies in a way that cannot be folded by user")
            return None
    out = ctx.call(
        aten.scaled_dot_product_attention.default,
        packed,
        groups.members(k.node),
        groups.members(v.node),
        folded_mask,
        0.0,
        False,
        **kwargs,
    )
    steps = query.shape[-2]
    sizes = [ctx.size(folded, 1), ctx.size(folded, rank - 2) if ctx.is_dynamic(steps) else steps]
    split = ctx.call(aten.unflatten.int, out, rank - 3, sizes)
    back = permuted(ctx, split, [0, rank - 3, *range(1, rank - 3), rank - 2, rank - 1])
    return Full(groups.unfold(back))


def _fold_mask(ctx: Context, groups: Any, key: Broadcast, mask: Value, query: Value) -> Any:
    """The mask of a group: the user's own mask, or the candidates' masks folded like the queries."""
    ndim = len(query.shape)
    if len(mask.shape) != ndim:
        if isinstance(mask, Full) and len(mask.shape) <= 2 and (len(mask.shape) < 2 or mask.shape[0] == 1):
            return mask.node
        return None
    if isinstance(mask, Broadcast) and mask.dim == 0 and mask.mult == 1 and mask.shape[-2] == 1:
        lifted = at_last_step(ctx, mask)
        if lifted.map == key.map:
            return groups.members(lifted.node)
    if isinstance(mask, Full) and mask.shape[0] == 1 and mask.shape[-2] == 1:
        return mask.node
    if mask.shape[0] != query.shape[0]:
        return None
    node = ctx.materialize(mask)
    steps = query.shape[-2]
    if mask.shape[-2] == 1 and steps != 1:
        size = ctx.apply(aten.sym_size.int, query, ndim - 2) if ctx.is_dynamic(steps) else steps
        node = ctx.call(aten.expand.default, node, [size if d == ndim - 2 else -1 for d in range(ndim)])
    folded = groups.fold(node)
    rank = len(shape_of(folded))
    packed = permuted(ctx, folded, [0, *range(2, rank - 2), 1, rank - 2, rank - 1])
    return ctx.call(aten.flatten.using_ints, packed, rank - 3, rank - 2)
