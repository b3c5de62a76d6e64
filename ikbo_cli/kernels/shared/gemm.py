"""Products whose partial sums stay wide, and the alignment of operands."""

from __future__ import annotations

import torch
from torch import Tensor

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
    if a.is_cuda and not differentiated:
        product = torch.bmm if a.ndim == 3 else torch.mm
        return product(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)


def unit_of(sizes: tuple[int, ...], dtype: torch.dtype) -> int:
    """16 bytes in elements where every size is a multiple of that, else 1."""
    unit = 16 // dtype.itemsize
    return unit if all(size % unit == 0 for size in sizes) else 1
