"""`ikbo::broadcast_target_attention`: candidates attend to their user's history through the index."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from ikbo_cli.errors import ShapeError
from ikbo_cli.kernels.shared.autograd import register_recompute
from ikbo_cli.kernels.shared.checks import FLOATS, INTEGERS, check_index, has_dtype, has_rank, same_size, text
from ikbo_cli.kernels.shared.device import capability, cdiv, dot_precision, packaging, power_of_two
from ikbo_cli.kernels.shared.forms import parse_form
from ikbo_cli.kernels.shared.rows import is_eager
from ikbo_cli.kernels.target_attention.aten import target_attention_aten
from ikbo_cli.kernels.target_attention.configs import AttentionConfig, attention_config, part_span

_OP = "broadcast_target_attention"


def broadcast_target_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    order: Tensor | None = None,
    offsets: Tensor | None = None,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    nan_if_empty: bool = False,
    form: str = "auto",
) -> Tensor:
    """Attention of each candidate's queries over its user's keys and values, read through the index.

    Args:
        q: `[B, S, H, D]`, bf16/fp16/fp32 (float64 runs as aten), any strides.
        k: `[U, L, H, D]`, dtype of `q`, any strides.
        v: `[U, L, H, D]`, dtype of `q`, any strides.
        index: `[B]`, int32 or int64, user of each candidate, any order.
        order: `[B]`, int32, from `group_candidates(index, U)`; computed here when None.
        offsets: `[U + 1]`, int32, likewise.
        lengths: `[U]`, int32 or int64: keys and values at and after a user's length are never used.
        mask: `[U, L]`, bool (True: keep) or a float dtype (added to the scaled scores).
        scale: Of the scores; `D ** -0.5` when None.
        nan_if_empty: A user without any key gives NaN rows (as a softmax over -inf does), else zeros.
        form: `auto`, `aten`, `triton` or `triton:field=value,...` (`AttentionConfig`).

    Returns:
        `[B, S, H, D]`, contiguous, dtype of `q`. On a GPU the rows of a candidate whose user is out of range
        are NaN. There a candidate's result depends on its pair alone, not on B, U, order or neighbours.

    Raises:
        ShapeError: Shapes or dtypes do not fit; both are named.
        IndexError: An index is out of range (CPU).
    """
    if order is None or offsets is None:
        order, offsets = torch.ops.ikbo.group(index, k.shape[0])
    return torch.ops.ikbo.broadcast_target_attention(  # type: ignore[no-any-return]
        q, k, v, index, order, offsets, lengths, mask, scale, nan_if_empty, form
    )


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    order: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    mask: Tensor | None,
) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        has_rank(_OP, name, tensor, 4)
        has_dtype(_OP, name, tensor, FLOATS)
        if tensor.dtype != q.dtype:
            raise ShapeError(f"{_OP}: q {text(q)} and {name} {text(tensor)} must have one dtype")
    for dim in (2, 3):
        same_size(_OP, ("q", q, dim), ("k", k, dim))
    for dim in range(4):
        same_size(_OP, ("k", k, dim), ("v", v, dim))
    check_index(_OP, index, ("q", q))
    same_size(_OP, ("order", order, 0), ("q", q, 0))
    has_dtype(_OP, "order", order, INTEGERS)
    has_dtype(_OP, "offsets", offsets, INTEGERS)
    if offsets.shape[0] != k.shape[0] + 1:
        raise ShapeError(f"{_OP}: offsets {text(offsets)} must have one entry more than users of k {text(k)}")
    if lengths is not None:
        has_rank(_OP, "lengths", lengths, 1)
        has_dtype(_OP, "lengths", lengths, INTEGERS)
        same_size(_OP, ("lengths", lengths, 0), ("k", k, 0))
    if mask is not None:
        has_rank(_OP, "mask", mask, 2)
        has_dtype(_OP, "mask", mask, (torch.bool, *FLOATS))
        for dim in (0, 1):
            same_size(_OP, ("mask", mask, dim), ("k", k, dim))


@triton_op("ikbo::broadcast_target_attention", mutates_args={})
def _target_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    order: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    mask: Tensor | None,
    scale: float | None,
    nan_if_empty: bool,
    form: str,
) -> Tensor:
    _check(q, k, v, index, order, offsets, lengths, mask)
    level, config = parse_form(form, AttentionConfig)
    factor = _scale(q, scale)
    on_triton = q.is_cuda and q.dtype != torch.float64 and 0 < q.shape[3] <= 256 and factor > 0
    if level == "aten" or not on_triton:
        out = target_attention_aten(q, k, v, index, order, offsets, lengths, mask, factor, nan_if_empty)
        return out.contiguous()
    if is_eager(q):
        return launch_target_attention(q, k, v, order, offsets, lengths, mask, factor, nan_if_empty, config=config)
    if not packaging():
        # descriptors cannot be traced: the launch stays one opaque operator
        return torch.ops.ikbo.target_attention_launch(
            q, k, v, order, offsets, lengths, mask, factor, nan_if_empty, form
        )
    return launch_target_attention(
        q, k, v, order, offsets, lengths, mask, factor, nan_if_empty, config=config, wrap=wrap_triton
    )


@torch.library.custom_op("ikbo::target_attention_launch", mutates_args=())
def _launch_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    mask: Tensor | None,
    scale: float,
    nan_if_empty: bool,
    form: str,
) -> Tensor:
    _, config = parse_form(form, AttentionConfig)
    return launch_target_attention(q, k, v, order, offsets, lengths, mask, scale, nan_if_empty, config=config)


def _fake_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    mask: Tensor | None,
    scale: float,
    nan_if_empty: bool,
    form: str,
) -> Tensor:
    return q.new_empty(q.shape)


_launch_operator.register_fake(_fake_launch)


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    order: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    mask: Tensor | None,
    scale: float | None,
    nan_if_empty: bool,
    form: str,
) -> Tensor:
    _check(q, k, v, index, order, offsets, lengths, mask)
    parse_form(form, AttentionConfig)
    return q.new_empty(q.shape)


_target_attention.register_fake(_fake)


def _recompute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    order: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    mask: Tensor | None,
    scale: float | None,
    nan_if_empty: bool,
    form: str,
) -> Tensor:
    return target_attention_aten(q, k, v, index, order, offsets, lengths, mask, _scale(q, scale), nan_if_empty)


register_recompute(_target_attention, _recompute)


def _scale(q: Tensor, scale: float | None) -> float:
    return scale if scale is not None else 1.0 / math.sqrt(max(q.shape[-1], 1))


def launch_target_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    mask: Tensor | None,
    scale: float,
    nan_if_empty: bool,
    *,
    config: AttentionConfig | None = None,
    out: Tensor | None = None,
    wrap: Callable[[Any], Any] | None = None,
) -> Tensor:
    """Launch the Triton form: one launch, or a second one that combines the parts of split keys.

    Args:
        q: `[B, S, H, D]`.
        k: `[U, L, H, D]`.
        v: `[U, L, H, D]`.
        order: `[B]`, int32.
        offsets: `[U + 1]`, int32.
        lengths: `[U]` or None.
        mask: `[U, L]` or None.
        scale: Positive.
        nan_if_empty: NaN, not zeros, for a user without keys.
        config: Tiles; by head size, steps and device when None.
        out: `[B, S, H, D]`, contiguous, written; allocated when None.
        wrap: `torch.library.wrap_triton` under a tracer, which rules out descriptors.
    """
    from ikbo_cli.kernels.target_attention import kernel

    candidates, steps, heads, head = q.shape
    users, keys = k.shape[:2]
    config = config or attention_config(q.dtype, head, steps, capability(q))
    span = part_span(config, keys)
    out = q.new_empty(candidates, steps, heads, head) if out is None else out
    parts = max(1, cdiv(keys, span)) if span else 1
    target, lse = out, out
    if parts > 1:
        target = q.new_empty(parts, candidates, steps, heads, head, dtype=torch.float32)
        lse = q.new_empty(parts, candidates, steps, heads, dtype=torch.float32)
    if mask is not None and mask.dtype == torch.bool:
        mask_kind, mask = 1, mask.view(torch.uint8)
    else:
        mask_kind = 0 if mask is None else 2
    block_d = power_of_two(head)
    tma = config.tma == 1 and wrap is None and head == block_d and all(map(_is_matrix, (k, v)))
    k_rows, v_rows = k, v
    if tma:
        k_rows, v_rows = (_descriptor(t, config.block_n, head) for t in (k, v))
    launch = wrap or (lambda kernel: kernel)
    tiles = candidates * steps // config.block_m + users + 1
    launch(kernel.target_attention_kernel)[(tiles, heads, parts)](
        q, k_rows, v_rows, q if mask is None else mask, q if lengths is None else lengths, order, offsets,
        target, lse,
        candidates, users, keys, steps, heads, span or keys,
        q.stride(0), q.stride(1), q.stride(2), q.stride(3),
        k.stride(0), k.stride(1), k.stride(2), k.stride(3),
        v.stride(0), v.stride(1), v.stride(2), v.stride(3),
        0 if mask is None else mask.stride(0), 0 if mask is None else mask.stride(1),
        scale * math.log2(math.e),
        D=head, BLOCK_D=block_d, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        SPLIT=parts > 1, HAS_LENGTHS=lengths is not None, MASK=mask_kind, NAN_IF_EMPTY=nan_if_empty,
        PRECISION=dot_precision(q.dtype), SCAN=128, TMA=tma,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if parts > 1:
        rows = candidates * steps * heads
        launch(kernel.target_attention_combine_kernel)[(cdiv(rows, 4),)](
            target, lse, out, rows, parts,
            D=head, BLOCK_D=block_d, BLOCK_M=4, BLOCK_P=16, NAN_IF_EMPTY=nan_if_empty, num_warps=2,
        )  # fmt: skip
    return out


def _is_matrix(t: Tensor) -> bool:
    """Whether `[U, L, H, D]` is a matrix of `U * L` rows that a descriptor can address."""
    unit = 16 // t.dtype.itemsize
    users, keys, heads, _ = t.shape
    return (
        t.stride(3) == 1
        and (users == 1 or t.stride(0) == keys * t.stride(1))
        and t.stride(1) % unit == 0
        and (heads == 1 or t.stride(2) % unit == 0)
        and (heads - 1) * t.stride(2) + t.shape[3] <= t.stride(1)
        and t.data_ptr() % 16 == 0
        and 0 < users * keys < 2**31
    )


def _descriptor(t: Tensor, rows: int, columns: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    users, keys, heads, head = t.shape
    width = (heads - 1) * t.stride(2) + head
    return TensorDescriptor(t, [users * keys, width], [t.stride(1), 1], [rows, columns])
