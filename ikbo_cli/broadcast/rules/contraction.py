"""Linear, matmul, einsum: split at the concat they contract, compact where one side alone repeats rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ikbo_cli.broadcast.context import Context
from ikbo_cli.broadcast.levels import at_level, shared_level
from ikbo_cli.broadcast.registry import rewrite, rule
from ikbo_cli.broadcast.rules.grouping import grouped_matmul
from ikbo_cli.broadcast.rules.pointwise import add_terms, join
from ikbo_cli.broadcast.values import (
    Broadcast,
    Concat,
    Full,
    Node,
    Sum,
    Value,
    has_broadcast,
    shape_of,
)

aten = torch.ops.aten

SIXTEEN_BIT = (torch.float16, torch.bfloat16)


@rule(aten.linear.default)
def linear(ctx: Context, x: Value, weight: Value, bias: Value | None = None) -> Any:
    """Rows stay rows; a concat of input features splits the weight by columns."""
    last = len(x.shape) - 1
    if not isinstance(weight, Full):
        return ctx.materialized(x, weight, bias)
    if isinstance(x, Broadcast) and x.dim != last:
        return x.with_node(ctx.call(aten.linear.default, x.node, weight, bias))
    if isinstance(x, Concat) and x.dim != last:
        return join([ctx.apply(aten.linear.default, part, weight, bias) for part in x.parts], x.dim)
    if isinstance(x, Concat) and has_broadcast(x):
        return linear_over_concat(ctx, x, weight, bias)
    return ctx.materialized(x, weight, bias)


@rewrite("IKB101", "broadcast-before-linear", status="stable")
def linear_over_concat(ctx: Context, x: Concat, weight: Value, bias: Value | None) -> Any:
    """Linear over a concat of user and candidate features.

    before:  linear(cat([x_user[idx], x_cand], -1), w)     x_user [U, K_u]  x_cand [B, K_c]  w [N, K_u + K_c]
    after:   linear(x_cand, w[:, K_u:]) + linear(x_user, w[:, :K_u])[idx]
    Valid when: the concat lies on the contracted axis; parts may be nested, interleaved, products or sums.
    Saves: (B - U) * K_u * N multiply-adds and the copy of the concat; adds one [U, N] buffer.
    Numerics: the sum is split by side; in 16-bit programs compact partial sums are kept in float32.
    Source: In-Kernel Broadcast Optimization (Meta, 2026), matmul decomposition; MaRI (arXiv 2602.23105).
    """
    last = len(x.shape) - 1
    if not ctx.allow("IKB101", x):
        return ctx.materialized(x, weight, bias)

    def apply(node: Node, spans: Sequence[tuple[int, int]], dtype: torch.dtype) -> Node:
        columns = _columns(ctx, weight, 1, spans)
        return ctx.call(aten.linear.default, ctx.cast(node, dtype), ctx.cast(columns, dtype))

    terms = split_contraction(ctx, x, last, apply)
    if bias is not None:
        terms.append(bias)
    return add_terms(ctx, terms, x.dtype)


def split_contraction(
    ctx: Context, x: Concat, dim: int, apply: Callable[[Node, Sequence[tuple[int, int]], torch.dtype], Node]
) -> list[Any]:
    """One term a level: the parts that repeat the same rows are contracted together, and so are the ordinary ones.

    Args:
        ctx: The context.
        x: The concat, along the contracted axis `dim`.
        dim: The contracted axis of `x`.
        apply: Contracts a node with the weight's entries `[(start, stop), ...]`, in a given dtype.
    """
    levels: dict[Any, list[tuple[Full | Broadcast, tuple[int, int]]]] = {}
    start = 0
    for part, width in zip(x.parts, x.widths, strict=True):
        if isinstance(part, Sum) and any(term.shape[dim - len(x.shape) :][:1] != (width,) for term in part.terms):
            part = Full(ctx.materialize(part))  # a term is repeated along the contracted axis
        for term in part.terms if isinstance(part, Sum) else [part]:
            span = (start, start + width)
            if isinstance(term, Concat):  # concatenated along another axis: written, unless it can be split there
                term = Full(ctx.materialize(term))
            levels.setdefault(_level_key(term), []).append((term, span))
        start += width
    terms: list[Any] = []
    full_rows = x.shape[:dim] + x.shape[dim + 1 :]
    for members in levels.values():
        first = members[0][0]
        nodes = [term.node for term, _ in members]
        node = nodes[0] if len(nodes) == 1 else ctx.call(aten.cat.default, nodes, dim)
        small = isinstance(first, Broadcast) or _rows(first, dim) != full_rows
        dtype = torch.float32 if x.dtype in SIXTEEN_BIT and small else x.dtype
        out = apply(node, [span for _, span in members], dtype)
        # The term belongs to this rewrite: reading it later is no site of its own.
        if isinstance(first, Broadcast):
            terms.append(dataclasses.replace(first, node=out, source="", moved=True))
        else:
            terms.append(Full(out))
    return terms


def _rows(value: Value, dim: int) -> tuple[int, ...]:
    return value.shape[:dim] + value.shape[dim + 1 :]


def _level_key(term: Full | Broadcast) -> Any:
    if isinstance(term, Broadcast):
        shape = shape_of(term.node)
        return (term.map, term.dim, term.mult, len(shape), shape[:-1])
    return ("full", term.shape[:-1])


def _columns(ctx: Context, weight: Value, dim: int, spans: Sequence[tuple[int, int]]) -> Node:
    """Entries of the weight along `dim`; neighbouring spans are cut out together."""
    merged: list[tuple[int, int]] = []
    for start, stop in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    node = weight.node if isinstance(weight, Full) else ctx.materialize(weight)
    if merged == [(0, shape_of(node)[dim])]:
        return node
    pieces = [ctx.call(aten.slice.Tensor, node, dim, start, stop) for start, stop in merged]
    return pieces[0] if len(pieces) == 1 else ctx.call(aten.cat.default, pieces, dim)


@rule(aten.addmm.default)
def addmm(ctx: Context, bias: Value, x: Value, weight: Value, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """`bias + x @ weight`, as exporters of older versions write a linear."""
    if beta == 1 and alpha == 1 and isinstance(bias, Full) and len(bias.shape) == 1:
        product = ctx.apply(aten.mm.default, x, weight)
        if not (isinstance(product, Full)):
            return ctx.apply(aten.add.Tensor, product, bias)
    return ctx.materialized(bias, x, weight, beta=beta, alpha=alpha)


@rule(aten.baddbmm.default)
def baddbmm(ctx: Context, bias: Value, a: Value, b: Value, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """`beta * bias + alpha * (a @ b)`, a batch at a time."""
    if isinstance(beta, (int, float)) and isinstance(alpha, (int, float)):
        product = ctx.apply(aten.bmm.default, a, b)
        scaled = product if alpha == 1 else ctx.apply(aten.mul.Tensor, product, alpha)
        if beta == 0:
            return scaled
        return ctx.apply(aten.add.Tensor, scaled, bias if beta == 1 else ctx.apply(aten.mul.Tensor, bias, beta))
    return ctx.materialized(bias, a, b, beta=beta, alpha=alpha)


@rule(aten.mm.default, aten.matmul.default, aten.bmm.default, aten.mv.default)
def matmul(ctx: Context, a: Value, b: Value) -> Any:
    """All products of matrices, with batches in front."""
    if len(a.shape) < 2 or len(b.shape) < 2:
        return _vector_matmul(ctx, a, b)
    level = shared_level([a, b])
    if level is not None and level.axis > 2:
        return level.value(ctx.call(ctx.op, at_level(ctx, a, level), at_level(ctx, b, level)), _out_rank(a, b))
    if isinstance(a, Broadcast) and isinstance(b, Full) and _independent(a, b, a.dim - len(a.shape)):
        out = ctx.call(aten.matmul.default, a.node, b)
        return a.with_node(out, dim=len(shape_of(out)) - (len(a.shape) - a.dim))
    if isinstance(b, Broadcast) and isinstance(a, Full) and b.dim - len(b.shape) == -1:
        out = ctx.call(aten.matmul.default, a, b.node)
        return b.with_node(out, dim=len(shape_of(out)) - 1)
    split = _split_matmul(ctx, a, b)
    if split is not None:
        return split
    grouped = grouped_matmul(ctx, a, b)
    return ctx.materialized(a, b) if grouped is None else grouped


def _vector_matmul(ctx: Context, a: Value, b: Value) -> Any:
    if len(b.shape) == 1 and len(a.shape) >= 2 and isinstance(b, Full):
        column = ctx.apply(aten.unsqueeze.default, b, 1)
        return ctx.apply(aten.squeeze.dim, ctx.apply(aten.matmul.default, a, column), -1)
    return ctx.materialized(a, b)


def _out_rank(a: Value, b: Value) -> int:
    return max(len(a.shape), len(b.shape))


def _independent(a: Broadcast, b: Full, axis: int) -> bool:
    """Whether `a`'s candidate axis (counted from the right) is a row or batch axis on which `b` is one or absent."""
    if axis == -1:
        return False
    return axis == -2 or len(b.shape) < -axis or b.shape[axis] == 1


def _split_matmul(ctx: Context, a: Value, b: Value) -> Any:
    """Concats in a product: split along K, or kept along rows and columns."""
    rows_of_a = isinstance(a, Concat) and a.dim - len(a.shape) == -2 and len(a.shape) >= len(b.shape)
    if isinstance(a, Concat) and rows_of_a and not isinstance(b, Concat):
        return join([ctx.apply(ctx.op, part, b) for part in a.parts], a.dim)
    if isinstance(b, Concat) and b.dim - len(b.shape) == -1 and not isinstance(a, Concat):
        rank = _out_rank(a, b)
        return join([ctx.apply(ctx.op, a, part) for part in b.parts], rank - 1)
    if isinstance(a, Concat) and a.dim == len(a.shape) - 1 and isinstance(b, Full) and len(b.shape) == 2:
        return _contract(
            ctx, a, len(a.shape) - 1, b, 0, lambda x, w: ctx.call(aten.matmul.default, x, w), "IKB101", (a, b)
        )
    if isinstance(b, Concat) and b.dim == len(b.shape) - 2 and isinstance(a, Full) and len(a.shape) == 2:
        return matmul_over_concat(ctx, a, b)
    if isinstance(a, Concat) and isinstance(b, Concat) and a.dim == len(a.shape) - 2 and b.dim == len(b.shape) - 1:
        return interaction(ctx, a, b)
    return None


@rewrite("IKB102", "broadcast-before-matmul", status="stable")
def matmul_over_concat(ctx: Context, a: Value, b: Concat) -> Any:
    """Linear compression: a weight from the left times a concat of user and candidate fields.

    before:  w @ cat([e_user[idx], e_cand], 1)     e_user [U, K_u, N]  e_cand [B, K_c, N]  w [M, K_u + K_c]
    after:   w[:, K_u:] @ e_cand + (w[:, :K_u] @ e_user)[idx]
    Valid when: the concat lies on the contracted axis and the weight has no rows.
    Saves: (B - U) * M * K_u * N multiply-adds and the copy of the concat; adds one [U, M, N] buffer.
    Numerics: as IKB101.
    Source: In-Kernel Broadcast Optimization (Meta, 2026), linear compression embedding (Wukong).
    """
    return _contract(ctx, b, len(b.shape) - 2, a, 1, lambda x, w: ctx.call(aten.matmul.default, w, x), "IKB102", (a, b))


def _contract(
    ctx: Context,
    concat: Concat,
    dim: int,
    weight: Value,
    weight_dim: int,
    product: Callable[[Node, Node], Node],
    code: str,
    original: tuple[Value, Value],
) -> Any:
    if not has_broadcast(concat):
        return None
    if not ctx.allow(code, concat):
        return ctx.materialized(*original)

    def apply(node: Node, spans: Sequence[tuple[int, int]], dtype: torch.dtype) -> Node:
        return product(ctx.cast(node, dtype), ctx.cast(_columns(ctx, weight, weight_dim, spans), dtype))

    return add_terms(ctx, split_contraction(ctx, concat, dim, apply), concat.dtype)


@rewrite("IKB106", "broadcast-before-interaction", status="preview")
def interaction(ctx: Context, a: Concat, b: Concat) -> Any:
    """Dot interaction of user and candidate fields with themselves.

    before:  x @ x.T with x = cat([e_user[idx], e_cand], 1)     e_user [U, F_u, D]  e_cand [B, F_c, D]
    after:   blocks: user-user on U rows, user-candidate grouped by user, candidate-candidate as it was
    Valid when: both operands are concats of rows and columns.
    Saves: (B - U) * F_u * F_u * D multiply-adds, and the copy of the concat.
    Numerics: the same products; only their place changes.
    Source: DLRM (arXiv 1906.00091); In-Kernel Broadcast Optimization (Meta, 2026).
    """
    if not has_broadcast([a, b]) or not ctx.allow("IKB106", a, b):
        return None
    mirrored = len(a.parts) == len(b.parts) and all(map(_is_transpose, a.parts, b.parts))
    blocks: list[list[Any]] = []
    for i, left in enumerate(a.parts):
        row = []
        for j, right in enumerate(b.parts):
            row.append(
                ctx.apply(aten.transpose.int, blocks[j][i], -2, -1)
                if mirrored and j < i
                else ctx.apply(ctx.op, left, right)
            )
        blocks.append(row)
    return join([join(row, b.dim) for row in blocks], a.dim)


def _is_transpose(left: Value, right: Value) -> bool:
    """Whether `right` was computed as the transpose of `left`."""
    if isinstance(left, Concat) or isinstance(right, Concat) or isinstance(left, Sum) or isinstance(right, Sum):
        return False
    node = right.node
    if not isinstance(node, fx.Node):
        return bool(shape_of(node) == shape_of(left.node.mT) and torch.equal(node, left.node.mT))
    ndim = len(left.shape)
    swapped = [*range(ndim - 2), ndim - 1, ndim - 2]
    if node.target is aten.permute.default:
        return node.args[0] is left.node and list(node.args[1]) == swapped  # type: ignore[arg-type]
    axes = {_axis(d) % ndim for d in node.args[1:3]} if node.target is aten.transpose.int else set()
    return axes == {ndim - 1, ndim - 2} and node.args[0] is left.node


@rule(aten.einsum.default)
def einsum(ctx: Context, equation: str, operands: Sequence[Value], *, path: Any = None) -> Any:
    """One or two operands become permutations and one matmul; what is left over is written."""
    result = None
    if len(operands) == 2 and "." not in equation and "->" in equation:
        result = _einsum_pair(ctx, equation.replace(" ", ""), operands[0], operands[1])
    return ctx.materialized(equation, operands) if result is None else result


def _einsum_pair(ctx: Context, equation: str, x: Value, y: Value) -> Any:
    inputs, out = equation.split("->")
    left, right = inputs.split(",")
    if any(len(set(letters)) != len(letters) for letters in (left, right, out)):
        return None
    shared = [c for c in left if c in right]
    if any(c not in right and c not in out for c in left) or any(c not in left and c not in out for c in right):
        return None
    batch = [c for c in out if c in shared]
    contracted = [c for c in shared if c not in out]
    rows = [c for c in left if c not in shared]
    columns = [c for c in right if c not in shared]
    if len(contracted) > 1 or len(rows) > 1 or len(columns) > 1:
        return _einsum_linear(ctx, left, right, out, x, y)
    if any(x.shape[left.index(c)] != y.shape[right.index(c)] for c in shared):
        return None
    a = _arrange(ctx, x, left, batch + rows + contracted, rows, contracted, transposed=False)
    b = _arrange(ctx, y, right, batch + contracted + columns, columns, contracted, transposed=True)
    product = ctx.apply(aten.matmul.default, a, b)
    have = [*batch, *(rows or ["1"]), *(columns or ["2"])]
    for extra in ("2", "1"):
        if extra in have:
            product = ctx.apply(aten.squeeze.dim, product, have.index(extra))
            have.remove(extra)
    return ctx.apply(aten.permute.default, product, [have.index(c) for c in out]) if have != list(out) else product


def _arrange(
    ctx: Context, x: Value, letters: str, wanted: Sequence[str], free: Sequence[str], contracted: Sequence[str],
    *, transposed: bool,
) -> Any:  # fmt: skip
    """Permute to (batch, free, contracted), or (batch, contracted, free), adding axes of 1 where one is missing."""
    order = [letters.index(c) for c in wanted]
    value: Any = x if order == list(range(len(order))) else ctx.apply(aten.permute.default, x, order)
    batch = len(wanted) - len(free) - len(contracted)
    if not free:
        value = ctx.apply(aten.unsqueeze.default, value, batch + 1 if transposed else batch)
    if not contracted:
        value = ctx.apply(aten.unsqueeze.default, value, batch if transposed else batch + 1)
    return value


def _einsum_linear(ctx: Context, left: str, right: str, out: str, x: Value, y: Value) -> Any:
    """Several free letters on one side: compact if the other operand has none of the candidate letters."""
    for value, letters, other in ((x, left, y), (y, right, x)):
        if isinstance(value, Broadcast) and isinstance(other, Full):
            letter = letters[value.dim]
            if letter in out and letter not in (right if letters is left else left):
                nodes = [v.node if isinstance(v, (Broadcast, Full)) else v for v in (x, y)]
                node = ctx.call(aten.einsum.default, f"{left},{right}->{out}", nodes)
                return value.with_node(node, dim=out.index(letter))
    if (
        (isinstance(x, Broadcast) and isinstance(y, Broadcast) and left[x.dim] == right[y.dim] and left[x.dim] in out)
        and x.map == y.map
        and x.mult == y.mult
    ):
        node = ctx.call(aten.einsum.default, f"{left},{right}->{out}", [x.node, y.node])
        return x.with_node(node, dim=out.index(left[x.dim]))
    return None


def _axis(argument: Any) -> int:
    return int(argument)


@rule(aten.tensordot.default)
def tensordot(
    ctx: Context, a: Value, b: Value, dims_self: Sequence[int], dims_other: Sequence[int], *args: Any, **kwargs: Any
) -> Any:
    """Free axes of the first operand come first in the result; a parameter as the second keeps its rows."""
    ndim = len(a.shape)
    contracted = [d % ndim for d in dims_self]
    if isinstance(b, Full) and isinstance(a, (Broadcast, Concat)) and a.dim not in contracted:
        dim = a.dim - sum(d < a.dim for d in contracted)
        if isinstance(a, Concat):
            parts = [ctx.apply(ctx.op, part, b, dims_self, dims_other, *args, **kwargs) for part in a.parts]
            return join(parts, dim)
        return a.with_node(ctx.call(ctx.op, a.node, b, dims_self, dims_other, *args, **kwargs), dim=dim)
    if contracted == [ndim - 1] and [d % len(b.shape) for d in dims_other] == [0] and len(b.shape) == 2:
        return ctx.apply(aten.matmul.default, a, b)
    return ctx.materialized(a, b, dims_self, dims_other, *args, **kwargs)
