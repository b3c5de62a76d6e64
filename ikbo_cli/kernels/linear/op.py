"""`ikbo::broadcast_linear`: a linear layer whose user part is computed once per user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from ikbo_cli.errors import ShapeError
from ikbo_cli.kernels.gather_add.op import gather_add_aten
from ikbo_cli.kernels.linear.configs import LinearConfig, linear_config
from ikbo_cli.kernels.shared.activation import activation_code, apply_activation
from ikbo_cli.kernels.shared.autograd import register_recompute
from ikbo_cli.kernels.shared.checks import FLOATS, check_index, has_dtype, has_rank, same_size, text
from ikbo_cli.kernels.shared.device import capability, cdiv, dot_precision
from ikbo_cli.kernels.shared.forms import parse_form
from ikbo_cli.kernels.shared.gemm import aligned_rows, unit_of, wide_matmul
from ikbo_cli.kernels.shared.rows import accumulate_dtype, size_hint

_OP = "broadcast_linear"


def broadcast_linear(
    x_cand: Tensor,
    w_cand: Tensor,
    index: Tensor,
    x_user: Tensor | None = None,
    w_user: Tensor | None = None,
    addend: Tensor | None = None,
    bias: Tensor | None = None,
    act: str = "none",
    form: str = "auto",
) -> Tensor:
    """Linear over user and candidate features: `act(x_cand w_cand^T + user[index] + bias)`.

    `user = x_user w_user^T + addend` has `U` rows and stays in float32; the result is rounded once.

    Args:
        x_cand: `[B, *, Kc]`, bf16/fp16/fp32 (float64 runs as aten), any strides (rows of 16-byte multiples
            take the fast path).
        w_cand: `[N, Kc]`, dtype of `x_cand`, any strides.
        index: `[B]`, int32 or int64, any order.
        x_user: `[U, *, Ku]`, dtype of `x_cand`, or None.
        w_user: `[N, Ku]`, dtype of `x_cand`, or None, together with `x_user`.
        addend: `[U, *, N]`, float32 (float64 with float64), or None.
        bias: `[N]`, dtype of `x_cand` or float32, or None.
        act: `none`, `relu`, `sigmoid`, `tanh`, `silu` or `gelu`.
        form: `auto`, `aten` (library GEMM into float32), `aten16` (library GEMM that rounds the candidate
            part to the dtype of `x_cand` before the sum), `triton` or `triton:field=value,...`
            (`LinearConfig`).

    Returns:
        `[B, *, N]`, contiguous, dtype of `x_cand`; NaN rows where the index is out of range on a GPU.

    Raises:
        ShapeError: Shapes or dtypes do not fit; both are named.
        IndexError: An index is out of range (CPU).
    """
    return torch.ops.ikbo.broadcast_linear(  # type: ignore[no-any-return]
        x_cand, w_cand, index, x_user, w_user, addend, bias, act, form
    )


def _check(
    x_cand: Tensor,
    w_cand: Tensor,
    index: Tensor,
    x_user: Tensor | None,
    w_user: Tensor | None,
    addend: Tensor | None,
    bias: Tensor | None,
    act: str,
) -> None:
    activation_code(act)
    has_rank(_OP, "x_cand", x_cand, 2, at_least=True)
    has_rank(_OP, "w_cand", w_cand, 2)
    has_dtype(_OP, "x_cand", x_cand, FLOATS)
    has_dtype(_OP, "w_cand", w_cand, (x_cand.dtype,))
    same_size(_OP, ("x_cand", x_cand, x_cand.ndim - 1), ("w_cand", w_cand, 1))
    check_index(_OP, index, ("x_cand", x_cand))
    if (x_user is None) != (w_user is None):
        raise ShapeError(f"{_OP}: x_user and w_user are given together or not at all")
    middle = range(1, x_cand.ndim - 1)
    for name, tensor in (("x_user", x_user), ("addend", addend)):
        if tensor is not None and tensor.ndim != x_cand.ndim:
            raise ShapeError(f"{_OP}: x_cand {text(x_cand)} and {name} {text(tensor)} must have one rank")
        for dim in middle:
            if tensor is not None:
                same_size(_OP, (name, tensor, dim), ("x_cand", x_cand, dim))
    if x_user is not None and w_user is not None:
        has_rank(_OP, "w_user", w_user, 2)
        for name, tensor in (("x_user", x_user), ("w_user", w_user)):
            has_dtype(_OP, name, tensor, (x_cand.dtype,))
        same_size(_OP, ("x_user", x_user, x_user.ndim - 1), ("w_user", w_user, 1))
        same_size(_OP, ("w_user", w_user, 0), ("w_cand", w_cand, 0))
    if addend is not None:
        has_dtype(_OP, "addend", addend, (accumulate_dtype(x_cand.dtype),))
        same_size(_OP, ("addend", addend, addend.ndim - 1), ("w_cand", w_cand, 0))
        if x_user is not None:
            same_size(_OP, ("addend", addend, 0), ("x_user", x_user, 0))
    if bias is not None:
        has_rank(_OP, "bias", bias, 1)
        has_dtype(_OP, "bias", bias, FLOATS)
        same_size(_OP, ("bias", bias, 0), ("w_cand", w_cand, 0))


@triton_op("ikbo::broadcast_linear", mutates_args={})
def _linear(
    x_cand: Tensor,
    w_cand: Tensor,
    index: Tensor,
    x_user: Tensor | None,
    w_user: Tensor | None,
    addend: Tensor | None,
    bias: Tensor | None,
    act: str,
    form: str,
) -> Tensor:
    _check(x_cand, w_cand, index, x_user, w_user, addend, bias, act)
    level, config = parse_form(form, LinearConfig)
    if level == "auto" and x_cand.dtype == torch.float32:
        level = "aten"  # exact float32 products have no tensor cores: the library's are faster
    if level.startswith("aten") or not x_cand.is_cuda or x_cand.dtype == torch.float64:
        return linear_aten(x_cand, w_cand, index, x_user, w_user, addend, bias, act, level).contiguous()
    user = user_part(x_user, w_user, addend)
    return launch_linear(x_cand, w_cand, index, user, bias, act, config=config, wrap=wrap_triton)


def _fake(
    x_cand: Tensor,
    w_cand: Tensor,
    index: Tensor,
    x_user: Tensor | None,
    w_user: Tensor | None,
    addend: Tensor | None,
    bias: Tensor | None,
    act: str,
    form: str,
) -> Tensor:
    _check(x_cand, w_cand, index, x_user, w_user, addend, bias, act)
    parse_form(form, LinearConfig)
    return x_cand.new_empty((*x_cand.shape[:-1], w_cand.shape[0]))


_linear.register_fake(_fake)


def user_part(x_user: Tensor | None, w_user: Tensor | None, addend: Tensor | None) -> Tensor | None:
    """`x_user w_user^T + addend`, `[U, *, N]` in float32 (float64 for float64), or None without either."""
    if x_user is None or w_user is None:
        return addend
    flat = x_user.flatten(0, -2)
    part = wide_matmul(flat, w_user.T).reshape(*x_user.shape[:-1], w_user.shape[0])
    return part if addend is None else part + addend


def linear_aten(
    x_cand: Tensor,
    w_cand: Tensor,
    index: Tensor,
    x_user: Tensor | None,
    w_user: Tensor | None,
    addend: Tensor | None,
    bias: Tensor | None,
    act: str,
    form: str,
) -> Tensor:
    """The same from aten operators; the candidate part is rounded before the sum only in form `aten16`."""
    user = user_part(x_user, w_user, addend)
    rows = x_cand.flatten(0, -2)
    part = rows @ w_cand.T if form == "aten16" else wide_matmul(rows, w_cand.T)
    part = part.reshape(*x_cand.shape[:-1], w_cand.shape[0])
    if user is not None:
        return gather_add_aten(part, user, index, bias, act).to(x_cand.dtype)
    part = part if bias is None else part + bias.to(part.dtype)
    return apply_activation(part, act).to(x_cand.dtype)


register_recompute(_linear, linear_aten)


def launch_linear(
    x_cand: Tensor,
    w_cand: Tensor,
    index: Tensor,
    user: Tensor | None,
    bias: Tensor | None,
    act: str,
    *,
    config: LinearConfig | None = None,
    out: Tensor | None = None,
    wrap: Callable[[Any], Any] = lambda kernel: kernel,
) -> Tensor:
    """Launch the Triton form of the candidate stage.

    Args:
        x_cand: `[B, *, K]`.
        w_cand: `[N, K]`.
        index: `[B]`.
        user: `[U, *, N]`, float32, or None.
        bias: `[N]` or None.
        act: Name of the activation.
        config: Tile; by size and device when None.
        out: `[B, *, N]`, contiguous, written; allocated when None.
        wrap: `torch.library.wrap_triton` inside an operator.
    """
    from ikbo_cli.kernels.linear import kernel

    columns, depth = w_cand.shape
    out = x_cand.new_empty((*x_cand.shape[:-1], columns)) if out is None else out
    x = x_cand.flatten(0, -2)
    rows = x.shape[0]
    table = x if user is None else (user[:, None] if user.ndim == 2 else user.flatten(1, -2))
    addend_strides = (0, 0, 0) if user is None else table.stride()
    if x.dtype.itemsize == 2 and columns >= 64:
        x = aligned_rows(x)  # unaligned rows cost a product more than this copy does
        w_cand = w_cand if w_cand.stride(0) == 1 else aligned_rows(w_cand)
    config = config or linear_config(x.dtype, size_hint(rows), columns, capability(x))
    k_unit = unit_of(depth, x.dtype)
    n_unit = unit_of(columns, x.dtype)
    x_unit = unit_of(x.stride(0), x.dtype)
    # the stride of w along its contiguous axis is the inner one: K, or N for a transposed weight
    n_contiguous = w_cand.stride(1) != 1 and w_cand.stride(0) == 1
    w_outer, w_inner = w_cand.stride()[::-1] if n_contiguous else w_cand.stride()
    w_unit = unit_of(w_outer, x.dtype)
    wrap(kernel.broadcast_linear_kernel)[(cdiv(rows, config.block_m) * cdiv(columns, config.block_n),)](
        x, w_cand, table, x if bias is None else bias, index, out,
        rows, 0 if user is None else user.shape[0], 1 if user is None else table.shape[1], columns // n_unit,
        depth // k_unit, x.stride(0) // x_unit, x.stride(1), w_outer // w_unit, w_inner, *addend_strides,
        0 if bias is None else bias.stride(0), index.stride(0),
        N_UNIT=n_unit, K_UNIT=k_unit, X_UNIT=x_unit, W_UNIT=w_unit, W_N_CONTIGUOUS=n_contiguous,
        EVEN_N=columns % config.block_n == 0, ACT=activation_code(act),
        HAS_ADDEND=user is not None, HAS_BIAS=bias is not None,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, HALVES=bool(config.halves),
        PRECISION=dot_precision(x.dtype), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
