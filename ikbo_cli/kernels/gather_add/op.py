"""`ikbo::broadcast_gather_add`: `act(x_cand + addend[index] + bias)` in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from ikbo_cli.errors import ShapeError
from ikbo_cli.kernels.gather_add.configs import GatherAddConfig, gather_add_config
from ikbo_cli.kernels.shared.activation import activation_code, apply_activation
from ikbo_cli.kernels.shared.autograd import register_recompute
from ikbo_cli.kernels.shared.checks import FLOATS, check_index, has_dtype, has_rank, same_size, text
from ikbo_cli.kernels.shared.device import cdiv
from ikbo_cli.kernels.shared.forms import parse_form
from ikbo_cli.kernels.shared.rows import accumulate_dtype, gather_rows

_OP = "broadcast_gather_add"


def broadcast_gather_add(
    x_cand: Tensor,
    addend: Tensor,
    index: Tensor,
    bias: Tensor | None = None,
    act: str = "none",
    form: str = "auto",
) -> Tensor:
    """Add each candidate's user row: `act(x_cand[b] + addend[index[b]] + bias)`, summed in float32.

    Args:
        x_cand: `[B, *, N]`, bf16/fp16/fp32/fp64, any strides.
        addend: `[U, *, N]`, float32 (float64 with a float64 `x_cand`): partial sums stay wide.
        index: `[B]`, int32 or int64, any order.
        bias: `[N]`, dtype of `x_cand` or float32.
        act: `none`, `relu`, `sigmoid`, `tanh`, `silu` or `gelu`.
        form: `auto`, `aten`, `triton` or `triton:field=value,...` (`GatherAddConfig`).

    Returns:
        `[B, *, N]`, contiguous, dtype of `x_cand`; NaN rows where the index is out of range on a GPU.

    Raises:
        ShapeError: Shapes or dtypes do not fit; both are named.
        IndexError: An index is out of range (CPU).
    """
    return torch.ops.ikbo.broadcast_gather_add(x_cand, addend, index, bias, act, form)  # type: ignore[no-any-return]


def _check(x_cand: Tensor, addend: Tensor, index: Tensor, bias: Tensor | None, act: str) -> None:
    activation_code(act)
    has_rank(_OP, "x_cand", x_cand, 2, at_least=True)
    has_dtype(_OP, "x_cand", x_cand, FLOATS)
    has_dtype(_OP, "addend", addend, (accumulate_dtype(x_cand.dtype),))
    if addend.ndim != x_cand.ndim:
        raise ShapeError(f"{_OP}: x_cand {text(x_cand)} and addend {text(addend)} must have one rank")
    for dim in range(1, x_cand.ndim):
        same_size(_OP, ("addend", addend, dim), ("x_cand", x_cand, dim))
    check_index(_OP, index, ("x_cand", x_cand))
    if bias is not None:
        has_rank(_OP, "bias", bias, 1)
        has_dtype(_OP, "bias", bias, FLOATS)
        same_size(_OP, ("bias", bias, 0), ("x_cand", x_cand, x_cand.ndim - 1))


@triton_op("ikbo::broadcast_gather_add", mutates_args={})
def _gather_add(x_cand: Tensor, addend: Tensor, index: Tensor, bias: Tensor | None, act: str, form: str) -> Tensor:
    _check(x_cand, addend, index, bias, act)
    level, config = parse_form(form, GatherAddConfig)
    # a compiler fuses the aten form with its neighbours, which it cannot do with a kernel of ours
    level = "aten" if level == "auto" and torch.compiler.is_compiling() else level
    if level == "aten" or not x_cand.is_cuda or x_cand.dtype == torch.float64:
        return gather_add_aten(x_cand, addend, index, bias, act).contiguous()
    return launch_gather_add(x_cand, addend, index, bias, act, config=config, wrap=wrap_triton)


def _fake(x_cand: Tensor, addend: Tensor, index: Tensor, bias: Tensor | None, act: str, form: str) -> Tensor:
    _check(x_cand, addend, index, bias, act)
    parse_form(form, GatherAddConfig)
    return x_cand.new_empty(x_cand.shape)


_gather_add.register_fake(_fake)


def gather_add_aten(x_cand: Tensor, addend: Tensor, index: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """The same from aten operators; one rounding, at the end."""
    out = x_cand.to(addend.dtype) + gather_rows(addend, index)
    out = out if bias is None else out + bias.to(out.dtype)
    return apply_activation(out, act).to(x_cand.dtype)


register_recompute(_gather_add, lambda x, a, i, b, act, form: gather_add_aten(x, a, i, b, act))


def launch_gather_add(
    x_cand: Tensor,
    addend: Tensor,
    index: Tensor,
    bias: Tensor | None,
    act: str,
    *,
    out: Tensor | None = None,
    config: GatherAddConfig | None = None,
    wrap: Callable[[Any], Any] = lambda kernel: kernel,
) -> Tensor:
    """Launch the Triton form; arguments as `broadcast_gather_add`.

    Args:
        x_cand: `[B, *, N]`.
        addend: `[U, *, N]`, float32.
        index: `[B]`.
        bias: `[N]` or None.
        act: Name of the activation.
        out: `[B, *, N]`, contiguous, written; may be `x_cand` itself; allocated when None.
        config: Blocks; by `N` when None.
        wrap: `torch.library.wrap_triton` inside an operator.
    """
    from ikbo_cli.kernels.gather_add import kernel

    out = x_cand.new_empty(x_cand.shape) if out is None else out
    columns = x_cand.shape[-1]
    x, table = (t[:, None] if t.ndim == 2 else t.flatten(1, -2) for t in (x_cand, addend))
    config = config or gather_add_config(columns)
    rows = x.shape[0] * x.shape[1]
    wrap(kernel.gather_add_kernel)[(cdiv(rows, config.block_r), cdiv(columns, config.block_n))](
        x, table, x if bias is None else bias, index, out,
        rows, table.shape[0], max(x.shape[1], 1), columns,
        *x.stride(), *table.stride(), 0 if bias is None else bias.stride(0), index.stride(0),
        ACT=activation_code(act), HAS_BIAS=bias is not None,
        BLOCK_R=config.block_r, BLOCK_N=config.block_n, num_warps=config.num_warps,
    )  # fmt: skip
    return out
