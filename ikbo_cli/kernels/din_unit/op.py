"""`ikbo::broadcast_din_unit`: DIN's attention unit, nothing per (candidate, key) stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from ikbo_cli.errors import ShapeError
from ikbo_cli.kernels.din_unit.configs import DinConfig, din_config, fits, unit_blocks
from ikbo_cli.kernels.din_unit.reference import din_activation
from ikbo_cli.kernels.shared.activation import ACTIVATIONS
from ikbo_cli.kernels.shared.autograd import register_recompute
from ikbo_cli.kernels.shared.checks import FLOATS, INTEGERS, check_index, has_dtype, has_rank, same_size, text
from ikbo_cli.kernels.shared.device import dot_precision, power_of_two
from ikbo_cli.kernels.shared.forms import parse_form
from ikbo_cli.kernels.shared.rows import accumulate_dtype, gather_rows

_OP = "broadcast_din_unit"
DIN_ACTIVATIONS = (*ACTIVATIONS, "prelu", "dice")
"""Hidden activations in the order of the kernel's codes."""


def broadcast_din_unit(
    q: Tensor,
    k: Tensor,
    index: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None = None,
    w2: Tensor | None = None,
    b2: Tensor | None = None,
    act: str = "sigmoid",
    params1: Tensor | None = None,
    params2: Tensor | None = None,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    softmax: bool = False,
    scale: float = 1.0,
    nan_if_empty: bool = False,
    form: str = "auto",
) -> Tensor:
    """Weighted sum of a user's keys, weights from an MLP over `[q, k, q - k, q * k]`.

    Args:
        q: `[B, D]`, bf16/fp16/fp32 (float64 runs as aten), any strides.
        k: `[U, L, D]`, dtype of `q`, any strides.
        index: `[B]`, int32 or int64, any order.
        w1: `[H1, 4 D]`, dtype of `q`: columns for q, k, q - k and q * k, in this order.
        b1: `[H1]` or None.
        w_out: `[1, H2]` (`[1, H1]` without a second layer), dtype of `q`.
        b_out: `[1]` or None.
        w2: `[H2, H1]`, dtype of `q`, or None: one hidden layer.
        b2: `[H2]` or None.
        act: Activation of the hidden layers: `none`, `relu`, `sigmoid`, `tanh`, `silu`, `gelu`, `prelu`
            (params: slope) or `dice` (params: slope, and scale and shift of the gate's input).
        params1: `[1 or 3, H1]`, any float dtype, for `prelu` and `dice`.
        params2: `[1 or 3, H2]`, likewise.
        lengths: `[U]`, int32 or int64: keys at and after a user's length are never used.
        mask: `[U, L]`, bool (True: keep) or, with `softmax`, a float dtype (added to the scaled scores).
        softmax: Normalize scores over the kept keys; else dropped keys weigh 0.
        scale: Multiplies the scores.
        nan_if_empty: With `softmax`, a user without any key gives NaN rows, else zeros.
        form: `auto`, `aten`, `triton` or `triton:field=value,...` (`DinConfig`).

    Returns:
        `[B, D]`, contiguous, dtype of `q`; NaN rows where the index is out of range on a GPU. A candidate's
        result does not depend on B, U or the other candidates there.

    Raises:
        ShapeError: Shapes or dtypes do not fit; both are named.
        IndexError: An index is out of range (CPU).
    """
    return torch.ops.ikbo.broadcast_din_unit(  # type: ignore[no-any-return]
        q, k, index, w1, b1, w_out, b_out, w2, b2, act, params1, params2, lengths, mask, softmax, scale,
        nan_if_empty, form,
    )  # fmt: skip


def _check(
    q: Tensor,
    k: Tensor,
    index: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    w2: Tensor | None,
    b2: Tensor | None,
    act: str,
    params1: Tensor | None,
    params2: Tensor | None,
    lengths: Tensor | None,
    mask: Tensor | None,
    softmax: bool,
) -> None:
    if act not in DIN_ACTIVATIONS:
        raise ShapeError(f"{_OP}: unknown activation {act!r}", hint=f"one of {', '.join(DIN_ACTIVATIONS)}")
    has_rank(_OP, "q", q, 2)
    has_rank(_OP, "k", k, 3)
    has_dtype(_OP, "q", q, FLOATS)
    same_size(_OP, ("k", k, 2), ("q", q, 1))
    check_index(_OP, index, ("q", q))
    layers = [("w1", w1, b1, params1)] + ([("w2", w2, b2, params2)] if w2 is not None else [])
    for name, weight, bias, params in layers:
        has_rank(_OP, name, weight, 2)
        if bias is not None:
            has_dtype(_OP, f"bias of {name}", bias, FLOATS)
            same_size(_OP, (f"bias of {name}", bias, 0), (name, weight, 0))
        rows = {"prelu": 1, "dice": 3}.get(act, 0)
        if rows and (params is None or params.ndim != 2 or params.shape[0] < rows):
            raise ShapeError(f"{_OP}: {act} needs parameters [{rows}, units] for {name} {text(weight)}")
        if rows and params is not None:
            same_size(_OP, (f"parameters of {name}", params, 1), (name, weight, 0))
    if w1.shape[1] != 4 * q.shape[1]:
        raise ShapeError(f"{_OP}: w1 {text(w1)} must have 4 columns for each of q {text(q)}")
    has_rank(_OP, "w_out", w_out, 2)
    last = ("w1", w1, 0)
    if w2 is not None:
        same_size(_OP, ("w2", w2, 1), ("w1", w1, 0))
        last = ("w2", w2, 0)
    same_size(_OP, ("w_out", w_out, 1), last)
    if w_out.shape[0] != 1 or (b_out is not None and b_out.numel() != 1):
        raise ShapeError(f"{_OP}: w_out {text(w_out)} and its bias must give one score")
    for name, tensor in (("k", k), ("w1", w1), ("w2", w2), ("w_out", w_out)):
        if tensor is not None:
            has_dtype(_OP, name, tensor, (q.dtype,))
    if lengths is not None:
        has_rank(_OP, "lengths", lengths, 1)
        has_dtype(_OP, "lengths", lengths, INTEGERS)
        same_size(_OP, ("lengths", lengths, 0), ("k", k, 0))
    if mask is not None:
        has_rank(_OP, "mask", mask, 2)
        has_dtype(_OP, "mask", mask, (torch.bool, *FLOATS) if softmax else (torch.bool,))
        for dim in (0, 1):
            same_size(_OP, ("mask", mask, dim), ("k", k, dim))


@triton_op("ikbo::broadcast_din_unit", mutates_args={})
def _din_unit(
    q: Tensor,
    k: Tensor,
    index: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    w2: Tensor | None,
    b2: Tensor | None,
    act: str,
    params1: Tensor | None,
    params2: Tensor | None,
    lengths: Tensor | None,
    mask: Tensor | None,
    softmax: bool,
    scale: float,
    nan_if_empty: bool,
    form: str,
) -> Tensor:
    _check(q, k, index, w1, b1, w_out, b_out, w2, b2, act, params1, params2, lengths, mask, softmax)
    level, config = parse_form(form, DinConfig)
    units = max(w1.shape[0], 0 if w2 is None else w2.shape[0])
    if level == "aten" or not q.is_cuda or q.dtype == torch.float64 or not fits(q.shape[1], units):
        return din_unit_aten(
            q, k, index, w1, b1, w_out, b_out, w2, b2, act, params1, params2, lengths, mask, softmax, scale,
            nan_if_empty, form,
        )  # fmt: skip
    return launch_din_unit(
        q, k, index, w1, b1, w_out, b_out, w2, b2, act, params1, params2, lengths, mask, softmax, scale,
        nan_if_empty, config=config, wrap=wrap_triton,
    )  # fmt: skip


def _fake(
    q: Tensor,
    k: Tensor,
    index: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    w2: Tensor | None,
    b2: Tensor | None,
    act: str,
    params1: Tensor | None,
    params2: Tensor | None,
    lengths: Tensor | None,
    mask: Tensor | None,
    softmax: bool,
    scale: float,
    nan_if_empty: bool,
    form: str,
) -> Tensor:
    _check(q, k, index, w1, b1, w_out, b_out, w2, b2, act, params1, params2, lengths, mask, softmax)
    parse_form(form, DinConfig)
    return q.new_empty(q.shape)


_din_unit.register_fake(_fake)


def din_unit_aten(
    q: Tensor,
    k: Tensor,
    index: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    w2: Tensor | None,
    b2: Tensor | None,
    act: str,
    params1: Tensor | None,
    params2: Tensor | None,
    lengths: Tensor | None,
    mask: Tensor | None,
    softmax: bool,
    scale: float,
    nan_if_empty: bool,
    form: str,
) -> Tensor:
    """The same from aten operators: one product a candidate with its merged weights, no `[B, L, 4 D]`."""
    wide = accumulate_dtype(q.dtype) if not q.is_cuda else q.dtype
    depth = q.shape[1]
    users, keys = k.shape[:2]
    if isinstance(users, int) and users == 0:
        return q.new_full(q.shape, float("nan"))
    weights = w1.to(accumulate_dtype(q.dtype))
    on_query, on_key, on_difference, on_product = (weights.narrow(1, i * depth, depth) for i in range(4))
    query = q.to(on_query.dtype)
    kept = None
    if lengths is not None:
        kept = torch.arange(keys, device=k.device) < lengths[:, None]
        k = k.masked_fill(~kept[:, :, None], 0.0)  # a weight of 0 times NaN in the padding would still be NaN
    if mask is not None and mask.dtype == torch.bool:
        kept = mask if kept is None else kept & mask
    row = gather_rows(k, index).to(wide)  # [B, L, D]
    merged = (on_key - on_difference).T + query[:, :, None] * on_product.T  # [B, D, H1]
    constant = query @ (on_query + on_difference).T
    constant = constant if b1 is None else constant + b1.to(constant.dtype)
    x = torch.baddbmm(constant.to(wide)[:, None, :], row, merged.to(wide))
    x = din_activation(x, act, params1)
    if w2 is not None:
        x = torch.nn.functional.linear(x, w2.to(wide), None if b2 is None else b2.to(wide))
        x = din_activation(x, act, params2)
    score = x @ w_out.to(wide)[0]
    score = (score if b_out is None else score + b_out.to(wide)) * scale
    safe = index.long().clamp(0, users - 1) if q.is_cuda else index.long()
    if mask is not None and mask.dtype != torch.bool:
        score = score + gather_rows(mask.to(wide), safe)
        unmasked = mask != float("-inf")
        kept = unmasked if kept is None else kept & unmasked
    if not softmax:
        if kept is not None:
            score = score.masked_fill(~kept.index_select(0, safe), 0.0)
        return torch.bmm(score[:, None, :], row)[:, 0].to(q.dtype)
    if kept is None and nan_if_empty:
        kept = row.new_ones((users, keys), dtype=torch.bool)  # keys may be 0
    if kept is None:
        return torch.bmm(torch.softmax(score, 1)[:, None, :], row)[:, 0].to(q.dtype)
    empty = ~kept.any(1)
    dropped = ~(kept | empty[:, None]).index_select(0, safe)  # a softmax over nothing has a NaN gradient
    score = score.masked_fill(empty.index_select(0, safe)[:, None], 0.0).masked_fill(dropped, float("-inf"))
    out = torch.bmm(torch.softmax(score, 1)[:, None, :], row)[:, 0]
    fill = float("nan") if nan_if_empty else 0.0
    out = out.masked_fill(empty.index_select(0, safe)[:, None], fill)
    if q.is_cuda:
        out = out.masked_fill(((index < 0) | (index >= users))[:, None], float("nan"))
    return out.to(q.dtype)


register_recompute(_din_unit, din_unit_aten)


def launch_din_unit(
    q: Tensor,
    k: Tensor,
    index: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
    w2: Tensor | None,
    b2: Tensor | None,
    act: str,
    params1: Tensor | None,
    params2: Tensor | None,
    lengths: Tensor | None,
    mask: Tensor | None,
    softmax: bool,
    scale: float,
    nan_if_empty: bool,
    *,
    config: DinConfig | None = None,
    out: Tensor | None = None,
    wrap: Callable[[Any], Any] = lambda kernel: kernel,
) -> Tensor:
    """Launch the Triton form, one program a candidate; arguments as `broadcast_din_unit`.

    Args:
        q: `[B, D]`.
        k: `[U, L, D]`.
        index: `[B]`.
        w1: `[H1, 4 D]`.
        b1: `[H1]` or None.
        w_out: `[1, H]` of the last hidden layer.
        b_out: `[1]` or None.
        w2: `[H2, H1]` or None.
        b2: `[H2]` or None.
        act: Name of the hidden activation.
        params1: `[1 or 3, H1]` or None.
        params2: `[1 or 3, H2]` or None.
        lengths: `[U]` or None.
        mask: `[U, L]` or None.
        softmax: Normalize scores.
        scale: Of the scores.
        nan_if_empty: NaN, not zeros, for a user without keys.
        config: Blocks; by sizes when None.
        out: `[B, D]`, contiguous, written; allocated when None.
        wrap: `torch.library.wrap_triton` inside an operator.
    """
    from ikbo_cli.kernels.din_unit import kernel

    batch, depth = q.shape
    users, keys = k.shape[:2]
    units1, units2 = w1.shape[0], 0 if w2 is None else w2.shape[0]
    out = q.new_empty(q.shape) if out is None else out
    config = config or din_config(q.dtype, depth, max(units1, units2))
    a1, b1_block = unit_blocks(units1)
    a2, b2_block = unit_blocks(units2) if units2 else (0, 0)
    mask_kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    if mask is not None and mask_kind == 1:
        mask = mask.view(torch.uint8)
    fast = q.is_cuda and q.dtype.itemsize == 2 and torch.version.hip is None
    wrap(kernel.din_unit_kernel)[(batch,)](
        q, k, index, *(q if t is None else t for t in (lengths, mask)),
        w1, *(q if t is None else t for t in (b1, params1, w2, b2, params2)), w_out,
        q if b_out is None else b_out, out,
        users, keys, units1, units2, scale,
        *q.stride(), *k.stride(), index.stride(0), *_strides(mask, 2),
        *w1.stride(), *_strides(b1, 1), *_strides(params1, 2),
        *_strides(w2, 2), *_strides(b2, 1), *_strides(params2, 2), w_out.stride(1),
        D=depth, BLOCK_D=power_of_two(depth), BLOCK_L=config.block_l, A1=a1, B1=b1_block, A2=a2, B2=b2_block,
        ACT=DIN_ACTIVATIONS.index(act), HAS_B1=b1 is not None, HAS_B2=b2 is not None,
        HAS_OUT_BIAS=b_out is not None, HAS_LENGTHS=lengths is not None, MASK=mask_kind, SOFTMAX=softmax,
        NAN_IF_EMPTY=nan_if_empty, PRECISION=dot_precision(q.dtype), FAST=fast,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def _strides(tensor: Tensor | None, rank: int) -> tuple[int, ...]:
    return (0,) * rank if tensor is None else tensor.stride()
