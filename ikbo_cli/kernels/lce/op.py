"""`ikbo::broadcast_lce`: linear compression of stacked features, user part computed once per user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from ikbo_cli.errors import ShapeError
from ikbo_cli.kernels.gather_add.op import gather_add_aten, launch_gather_add
from ikbo_cli.kernels.lce.configs import LceConfig, last_rows, lce_config
from ikbo_cli.kernels.shared.activation import activation_code, apply_activation
from ikbo_cli.kernels.shared.autograd import register_recompute
from ikbo_cli.kernels.shared.checks import FLOATS, check_index, has_dtype, has_rank, same_size
from ikbo_cli.kernels.shared.device import capability, cdiv, dot_precision, packaging
from ikbo_cli.kernels.shared.forms import parse_form
from ikbo_cli.kernels.shared.gemm import aligned_rows, unit_of, wide_matmul
from ikbo_cli.kernels.shared.rows import accumulate_dtype, is_eager

_OP = "broadcast_lce"


def broadcast_lce(
    e_cand: Tensor,
    w_cand: Tensor,
    index: Tensor,
    e_user: Tensor | None = None,
    w_user: Tensor | None = None,
    addend: Tensor | None = None,
    bias: Tensor | None = None,
    act: str = "none",
    form: str = "auto",
) -> Tensor:
    """Compress stacked features: `act(w_cand @ e_cand[b] + user[index[b]] + bias[:, None])`.

    `user = w_user @ e_user + addend` has `U` blocks and stays in float32; the result is rounded once.

    Args:
        e_cand: `[B, Kc, N]`, bf16/fp16/fp32 (float64 runs as aten), any strides.
        w_cand: `[M, Kc]`, dtype of `e_cand`, any strides (rows that are no 16-byte multiples are copied).
        index: `[B]`, int32 or int64, any order.
        e_user: `[U, Ku, N]`, dtype of `e_cand`, or None.
        w_user: `[M, Ku]`, dtype of `e_cand`, or None, together with `e_user`.
        addend: `[U, M, N]`, float32 (float64 with float64), or None.
        bias: `[M]`, dtype of `e_cand` or float32, or None.
        act: `none`, `relu`, `sigmoid`, `tanh`, `silu` or `gelu`.
        form: `auto`, `aten` (library product into float32), `aten16` (library product that rounds the
            candidate part to the dtype of `e_cand` before the sum), `triton` or `triton:field=value,...`
            (`LceConfig`).

    Returns:
        `[B, M, N]`, contiguous, dtype of `e_cand`; NaN where the index is out of range on a GPU.

    Raises:
        ShapeError: Shapes or dtypes do not fit; both are named.
        IndexError: An index is out of range (CPU).
    """
    return torch.ops.ikbo.broadcast_lce(  # type: ignore[no-any-return]
        e_cand, w_cand, index, e_user, w_user, addend, bias, act, form
    )


def _check(
    e_cand: Tensor,
    w_cand: Tensor,
    index: Tensor,
    e_user: Tensor | None,
    w_user: Tensor | None,
    addend: Tensor | None,
    bias: Tensor | None,
    act: str,
) -> None:
    activation_code(act)
    has_rank(_OP, "e_cand", e_cand, 3)
    has_rank(_OP, "w_cand", w_cand, 2)
    has_dtype(_OP, "e_cand", e_cand, FLOATS)
    has_dtype(_OP, "w_cand", w_cand, (e_cand.dtype,))
    same_size(_OP, ("e_cand", e_cand, 1), ("w_cand", w_cand, 1))
    check_index(_OP, index, ("e_cand", e_cand))
    if (e_user is None) != (w_user is None):
        raise ShapeError(f"{_OP}: e_user and w_user are given together or not at all")
    if e_user is not None and w_user is not None:
        has_rank(_OP, "e_user", e_user, 3)
        has_rank(_OP, "w_user", w_user, 2)
        for name, tensor in (("e_user", e_user), ("w_user", w_user)):
            has_dtype(_OP, name, tensor, (e_cand.dtype,))
        same_size(_OP, ("e_user", e_user, 1), ("w_user", w_user, 1))
        same_size(_OP, ("e_user", e_user, 2), ("e_cand", e_cand, 2))
        same_size(_OP, ("w_user", w_user, 0), ("w_cand", w_cand, 0))
    if addend is not None:
        has_rank(_OP, "addend", addend, 3)
        has_dtype(_OP, "addend", addend, (accumulate_dtype(e_cand.dtype),))
        same_size(_OP, ("addend", addend, 1), ("w_cand", w_cand, 0))
        same_size(_OP, ("addend", addend, 2), ("e_cand", e_cand, 2))
        if e_user is not None:
            same_size(_OP, ("addend", addend, 0), ("e_user", e_user, 0))
    if bias is not None:
        has_rank(_OP, "bias", bias, 1)
        has_dtype(_OP, "bias", bias, FLOATS)
        same_size(_OP, ("bias", bias, 0), ("w_cand", w_cand, 0))


@triton_op("ikbo::broadcast_lce", mutates_args={})
def _lce(
    e_cand: Tensor,
    w_cand: Tensor,
    index: Tensor,
    e_user: Tensor | None,
    w_user: Tensor | None,
    addend: Tensor | None,
    bias: Tensor | None,
    act: str,
    form: str,
) -> Tensor:
    _check(e_cand, w_cand, index, e_user, w_user, addend, bias, act)
    level, _ = parse_form(form, LceConfig)
    if level == "auto" and e_cand.dtype == torch.float32:
        level = "aten"  # exact float32 products have no tensor cores: the library's are faster
    if not e_cand.is_cuda or e_cand.dtype == torch.float64 or level == "aten":
        return lce_aten(e_cand, w_cand, index, e_user, w_user, addend, bias, act, level).contiguous()
    user = None
    if e_user is not None and w_user is not None:
        user = _stage(e_user, w_user, None, None, None, "none", True, "triton")
    user = addend if user is None else user if addend is None else user + addend
    if level == "aten16":
        part = torch.bmm(aligned_rows(w_cand).expand(e_cand.shape[0], -1, -1), e_cand)
        if user is None or bias is not None or torch.compiler.is_compiling():
            return _finish(part, user, index, bias, act, e_cand.dtype).contiguous()
        return launch_gather_add(part, user, index, None, act, wrap=wrap_triton)
    return _stage(e_cand, w_cand, index, user, bias, act, False, form)


def _stage(
    e_cand: Tensor,
    w_cand: Tensor,
    index: Tensor | None,
    user: Tensor | None,
    bias: Tensor | None,
    act: str,
    wide: bool,
    form: str,
) -> Tensor:
    """One stage by the launch that fits: direct, opaque under a tracer, or traced for a package."""
    if not is_eager(e_cand) and not packaging():
        # descriptors cannot be traced
        return torch.ops.ikbo.lce_launch(e_cand, w_cand, index, user, bias, act, wide, form)  # type: ignore[no-any-return]
    _, config = parse_form(form, LceConfig)
    wrap = None if is_eager(e_cand) else wrap_triton
    return launch_lce(e_cand, w_cand, index, user, bias, act, wide=wide, config=config, wrap=wrap)


@torch.library.custom_op("ikbo::lce_launch", mutates_args=())
def _launch_operator(
    e_cand: Tensor,
    w_cand: Tensor,
    index: Tensor | None,
    user: Tensor | None,
    bias: Tensor | None,
    act: str,
    wide: bool,
    form: str,
) -> Tensor:
    return _stage(e_cand, w_cand, index, user, bias, act, wide, form)


def _fake_launch(
    e_cand: Tensor,
    w_cand: Tensor,
    index: Tensor | None,
    user: Tensor | None,
    bias: Tensor | None,
    act: str,
    wide: bool,
    form: str,
) -> Tensor:
    shape = (e_cand.shape[0], w_cand.shape[0], e_cand.shape[2])
    return e_cand.new_empty(shape, dtype=torch.float32 if wide else e_cand.dtype)


_launch_operator.register_fake(_fake_launch)


def _fake(
    e_cand: Tensor,
    w_cand: Tensor,
    index: Tensor,
    e_user: Tensor | None,
    w_user: Tensor | None,
    addend: Tensor | None,
    bias: Tensor | None,
    act: str,
    form: str,
) -> Tensor:
    _check(e_cand, w_cand, index, e_user, w_user, addend, bias, act)
    parse_form(form, LceConfig)
    return e_cand.new_empty((e_cand.shape[0], w_cand.shape[0], e_cand.shape[2]))


_lce.register_fake(_fake)


def lce_aten(
    e_cand: Tensor,
    w_cand: Tensor,
    index: Tensor,
    e_user: Tensor | None,
    w_user: Tensor | None,
    addend: Tensor | None,
    bias: Tensor | None,
    act: str,
    form: str,
) -> Tensor:
    """The same from aten operators; the candidate part is rounded before the sum only in form `aten16`."""
    user = addend
    if e_user is not None and w_user is not None:
        user = wide_matmul(w_user.expand(e_user.shape[0], -1, -1), e_user)
        user = user if addend is None else user + addend
    weights = w_cand.expand(e_cand.shape[0], -1, -1)
    part = torch.bmm(weights, e_cand) if form == "aten16" else wide_matmul(weights, e_cand)
    return _finish(part, user, index, bias, act, e_cand.dtype)


def _finish(
    part: Tensor, user: Tensor | None, index: Tensor, bias: Tensor | None, act: str, dtype: torch.dtype
) -> Tensor:
    wide = accumulate_dtype(dtype)
    if bias is not None:
        part = part.to(wide) + bias.to(wide)[:, None]
    if user is None:
        return apply_activation(part, act).to(dtype)
    return gather_add_aten(part, user, index, None, act).to(dtype)


register_recompute(_lce, lce_aten)


def launch_lce(
    e_cand: Tensor,
    w_cand: Tensor,
    index: Tensor | None,
    user: Tensor | None,
    bias: Tensor | None,
    act: str,
    *,
    wide: bool = False,
    config: LceConfig | None = None,
    out: Tensor | None = None,
    wrap: Callable[[Any], Any] | None = None,
) -> Tensor:
    """Launch the Triton form of one stage.

    Args:
        e_cand: `[B, K, N]`.
        w_cand: `[M, K]`.
        index: `[B]`; None without `user`.
        user: `[U, M, N]`, float32, or None.
        bias: `[M]` or None.
        act: Name of the activation.
        wide: Whether the result is float32 (a user part), not the dtype of `e_cand`.
        config: Tile; by size and device when None.
        out: `[B, M, N]`, contiguous, written; allocated when None.
        wrap: `torch.library.wrap_triton` under a tracer, which rules out descriptors.
    """
    from ikbo_cli.kernels.lce import kernel

    batch, depth, columns = e_cand.shape
    rows = w_cand.shape[0]
    dtype = torch.float32 if wide else e_cand.dtype
    out = e_cand.new_empty((batch, rows, columns), dtype=dtype) if out is None else out
    if e_cand.dtype.itemsize == 2:
        w_cand = aligned_rows(w_cand)
    config = config or lce_config(e_cand.dtype, rows, columns, capability(e_cand), small=wide)
    k_unit = unit_of(depth, e_cand.dtype)
    n_unit = unit_of(columns, e_cand.dtype)
    w_unit = unit_of(w_cand.stride(0), e_cand.dtype)
    e_unit = unit_of(e_cand.stride(1), e_cand.dtype)
    tiles = cdiv(rows, config.block_m) * cdiv(columns, config.block_n)
    last = last_rows(config, rows)
    w, w_last, e = w_cand, w_cand, e_cand
    tma = config.tma == 1 and wrap is None and _addressable(w_cand, e_cand)
    if tma:
        w, w_last, e = _descriptors(w_cand, e_cand, config, last)
    launch = wrap or (lambda kernel: kernel)
    launch(kernel.broadcast_lce_kernel)[(batch * tiles,)](
        w, w_last, e, e_cand if user is None else user, e_cand if bias is None else bias,
        e_cand if index is None else index, out,
        0 if user is None else user.shape[0], rows, columns // n_unit, depth // k_unit,
        w_cand.stride(0) // w_unit, w_cand.stride(1),
        e_cand.stride(0), e_cand.stride(1) // e_unit, e_cand.stride(2),
        *((0, 0, 0) if user is None else user.stride()),
        0 if bias is None else bias.stride(0), 0 if index is None else index.stride(0),
        N_UNIT=n_unit, K_UNIT=k_unit, W_UNIT=w_unit, E_UNIT=e_unit, EVEN_N=columns % config.block_n == 0,
        ACT=activation_code(act), HAS_ADDEND=user is not None, HAS_BIAS=bias is not None,
        BLOCK_M=config.block_m, LAST_M=last, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, HALVES=bool(config.halves), PRECISION=dot_precision(e_cand.dtype), TMA=tma,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def _addressable(w_cand: Tensor, e_cand: Tensor) -> bool:
    """Whether both operands have the alignment that descriptors need."""
    unit = 16 // e_cand.dtype.itemsize
    return (
        w_cand.stride(1) == 1
        and e_cand.stride(2) == 1
        and all(t.data_ptr() % 16 == 0 and t.numel() > 0 for t in (w_cand, e_cand))
        and all(s % unit == 0 for s in (w_cand.stride(0), e_cand.stride(0), e_cand.stride(1)))
    )


def _descriptors(w_cand: Tensor, e_cand: Tensor, config: LceConfig, last: int) -> tuple[Any, Any, Any]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    shape, strides = list(w_cand.shape), list(w_cand.stride())
    w, w_last = (
        TensorDescriptor(w_cand, shape, strides, [height, config.block_k]) for height in (config.block_m, last)
    )
    block = [1, config.block_k, config.block_n]
    return w, w_last, TensorDescriptor(e_cand, list(e_cand.shape), list(e_cand.stride()), block)
