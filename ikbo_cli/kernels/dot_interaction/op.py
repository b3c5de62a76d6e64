"""`ikbo::broadcast_dot_interaction`: dot products of all field pairs, each computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from ikbo_cli.kernels.dot_interaction.configs import MAX_FIELDS, DotConfig, dot_config
from ikbo_cli.kernels.shared.autograd import register_recompute
from ikbo_cli.kernels.shared.checks import FLOATS, check_index, has_dtype, has_rank, same_size
from ikbo_cli.kernels.shared.device import dot_precision, power_of_two
from ikbo_cli.kernels.shared.forms import parse_form
from ikbo_cli.kernels.shared.rows import accumulate_dtype, gather_rows

_OP = "broadcast_dot_interaction"


def broadcast_dot_interaction(
    x_user: Tensor, x_cand: Tensor, index: Tensor, dense: Tensor | None = None, form: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Dot products of user and candidate fields; those of two user fields have `U` rows only.

    Args:
        x_user: `[U, F_u, D]`, bf16/fp16/fp32 (float64 runs as aten), any strides.
        x_cand: `[B, F_c, D]`, dtype of `x_user`, any strides.
        index: `[B]`, int32 or int64, any order.
        dense: `[B, N]`, dtype of `x_user`: columns appended to `mixed`, or None.
        form: `auto`, `aten`, `triton` or `triton:field=value,...` (`DotConfig`).

    Returns:
        uu: `[U, F_u (F_u - 1) / 2]`, upper triangle of the user fields' products, row-major.
        mixed: `[B, P]`: `F_u * F_c` user-candidate products row-major, the candidate fields' upper triangle,
            the dense columns, zeros up to a multiple of 8. User-candidate products of an index out of range
            are NaN on a GPU.

    Raises:
        ShapeError: Shapes or dtypes do not fit; both are named.
        IndexError: An index is out of range (CPU).
    """
    uu, mixed = torch.ops.ikbo.broadcast_dot_interaction(x_user, x_cand, index, dense, form)
    return uu, mixed


def mixed_width(user_fields: int, cand_fields: int, dense_columns: int) -> int:
    """Columns of `mixed`: all products and dense columns, rounded up to a multiple of 8."""
    used = user_fields * cand_fields + cand_fields * (cand_fields - 1) // 2 + dense_columns
    return (used + 7) // 8 * 8


def _check(x_user: Tensor, x_cand: Tensor, index: Tensor, dense: Tensor | None) -> None:
    has_rank(_OP, "x_user", x_user, 3)
    has_rank(_OP, "x_cand", x_cand, 3)
    has_dtype(_OP, "x_user", x_user, FLOATS)
    has_dtype(_OP, "x_cand", x_cand, (x_user.dtype,))
    same_size(_OP, ("x_user", x_user, 2), ("x_cand", x_cand, 2))
    check_index(_OP, index, ("x_cand", x_cand))
    if dense is not None:
        has_rank(_OP, "dense", dense, 2)
        has_dtype(_OP, "dense", dense, (x_user.dtype,))
        same_size(_OP, ("dense", dense, 0), ("x_cand", x_cand, 0))


@triton_op("ikbo::broadcast_dot_interaction", mutates_args={})
def _dot_interaction(
    x_user: Tensor, x_cand: Tensor, index: Tensor, dense: Tensor | None, form: str
) -> tuple[Tensor, Tensor]:
    _check(x_user, x_cand, index, dense)
    level, config = parse_form(form, DotConfig)
    small = x_user.shape[1] + x_cand.shape[1] <= MAX_FIELDS
    if level == "aten" or not x_cand.is_cuda or x_cand.dtype == torch.float64 or not small:
        return dot_interaction_aten(x_user, x_cand, index, dense)
    return launch_dot_interaction(x_user, x_cand, index, dense, config=config, wrap=wrap_triton)


def _fake(x_user: Tensor, x_cand: Tensor, index: Tensor, dense: Tensor | None, form: str) -> tuple[Tensor, Tensor]:
    _check(x_user, x_cand, index, dense)
    parse_form(form, DotConfig)
    return _outputs(x_user, x_cand, dense)


_dot_interaction.register_fake(_fake)


def _outputs(x_user: Tensor, x_cand: Tensor, dense: Tensor | None) -> tuple[Tensor, Tensor]:
    fields = x_user.shape[1]
    width = mixed_width(fields, x_cand.shape[1], 0 if dense is None else dense.shape[1])
    uu = x_user.new_empty(x_user.shape[0], fields * (fields - 1) // 2)
    return uu, x_cand.new_empty(x_cand.shape[0], width)


def dot_interaction_aten(x_user: Tensor, x_cand: Tensor, index: Tensor, dense: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same from aten operators."""
    batch, cand_fields, _ = x_cand.shape
    user_fields = x_user.shape[1]
    wide = accumulate_dtype(x_cand.dtype) if not x_cand.is_cuda else x_cand.dtype
    user, cand = x_user.to(wide), x_cand.to(wide)
    rows, columns = torch.triu_indices(user_fields, user_fields, 1, device=user.device)
    uu = torch.bmm(user, user.transpose(1, 2))[:, rows, columns].to(x_user.dtype)
    rows, columns = torch.triu_indices(cand_fields, cand_fields, 1, device=cand.device)
    mixed = torch.bmm(gather_rows(user, index), cand.transpose(1, 2))
    parts = [
        mixed.reshape(batch, user_fields * cand_fields).to(x_cand.dtype),
        torch.bmm(cand, cand.transpose(1, 2))[:, rows, columns].to(x_cand.dtype),
    ]
    if dense is not None:
        parts.append(dense)
    used = sum(part.shape[1] for part in parts)
    width = mixed_width(user_fields, cand_fields, 0 if dense is None else dense.shape[1])
    parts.append(x_cand.new_zeros(batch, width - used))
    return uu, torch.cat(parts, 1)


register_recompute(_dot_interaction, lambda u, c, i, d, form: dot_interaction_aten(u, c, i, d))


def launch_dot_interaction(
    x_user: Tensor,
    x_cand: Tensor,
    index: Tensor,
    dense: Tensor | None,
    *,
    config: DotConfig | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    wrap: Callable[[Any], Any] = lambda kernel: kernel,
) -> tuple[Tensor, Tensor]:
    """Launch the Triton form: one launch for both results.

    Args:
        x_user: `[U, F_u, D]`.
        x_cand: `[B, F_c, D]`.
        index: `[B]`.
        dense: `[B, N]` or None.
        config: Blocks; by dtype and D when None.
        out: `uu` and `mixed`, contiguous, written; allocated when None.
        wrap: `torch.library.wrap_triton` inside an operator.
    """
    from ikbo_cli.kernels.dot_interaction import kernel

    users, user_fields, depth = x_user.shape
    batch, cand_fields, _ = x_cand.shape
    uu, mixed = _outputs(x_user, x_cand, dense) if out is None else out
    config = config or dot_config(x_cand.dtype, depth)
    dense_columns = 0 if dense is None else dense.shape[1]
    wrap(kernel.dot_interaction_kernel)[(batch + users,)](
        x_user, x_cand, x_cand if dense is None else dense, index, uu, mixed,
        batch, users, depth, dense_columns, mixed.shape[1],
        *x_user.stride(), *x_cand.stride(), *((0, 0) if dense is None else dense.stride()), index.stride(0),
        FU=user_fields, FC=cand_fields, BLOCK_F=power_of_two(user_fields + cand_fields),
        BLOCK_U=power_of_two(user_fields), BLOCK_C=power_of_two(cand_fields),
        BLOCK_D=min(config.block_d, power_of_two(depth)), BLOCK_T=64,
        PRECISION=dot_precision(x_cand.dtype), num_warps=config.num_warps, num_stages=1,
    )  # fmt: skip
    return uu, mixed
