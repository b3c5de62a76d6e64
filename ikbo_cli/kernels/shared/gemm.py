"""Products whose partial sums stay wide, and the alignment of operands."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ikbo_cli.kernels.shared.device import packaging
from ikbo_cli.kernels.shared.rows import accumulate_dtype


def wide_matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` in float32 (float64 for float64), without rounding to the operands' dtype.

    Args:
        a: `[M, K]` or `[G, M, K]`, any float dtype.
        b: `[K, N]` or `[G, K, N]`, dtype of `a`.
    """
    wide = accumulate_dtype(a.dtype)
    if a.dtype == wide:
        return a @ b
    differentiated = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    if a.is_cuda and not differentiated and not packaging():  # a package cannot call mm with an output dtype
        product = torch.bmm if a.ndim == 3 else torch.mm
        return product(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)


def unit_of(size: int, dtype: torch.dtype) -> int:
    """Largest power of two, up to 16 bytes of elements, that divides a size: alignment a kernel may use."""
    return math.gcd(size, 16 // dtype.itemsize) if isinstance(size, int) else 1


def aligned_rows(matrix: Tensor) -> Tensor:
    """The matrix, copied to rows of 16-byte multiples where they are none; columns stay contiguous.

    Args:
        matrix: `[R, K]`, any strides.

    Returns:
        `[R, K]`, possibly a view of a padded copy.
    """
    columns = matrix.shape[1]
    unit = 16 // matrix.dtype.itemsize
    if matrix.stride(1) == 1 and unit_of(matrix.stride(0), matrix.dtype) == unit:
        return matrix
    return functional.pad(matrix, (0, -columns % unit)).narrow(1, 0, columns)
