"""The gate: error relative to the original's own error, both against float64, pooled over cases."""

from __future__ import annotations

import torch

LIMITS = {torch.float32: (2.0, 1.0), torch.bfloat16: (1.25, 0.01), torch.float16: (1.25, 0.01)}
"""By dtype: allowed ratio of RMS errors, and the floor in units of eps times the RMS of the reference."""


class Gate:
    """Errors of many cases of one operator and dtype, each in units of its reference's RMS.

    `rounded` marks forms that round a partial sum, which answer to a ratio of 2 (16-bit programs).
    """

    def __init__(self, dtype: torch.dtype, rounded: bool = False) -> None:
        self.dtype = dtype
        ratio, floor = LIMITS[dtype]
        self.ratio = 2.0 if rounded else ratio
        self.floor = floor * torch.finfo(dtype).eps
        self.elements = 0
        self.squares = [0.0, 0.0]
        self.largest = [0.0, 0.0]

    def add(self, optimized: torch.Tensor, original: torch.Tensor, truth: torch.Tensor) -> None:
        """Compare one output tensor; NaN and infinity patterns must match the truth's at once."""
        assert optimized.shape == truth.shape, (optimized.shape, truth.shape)
        assert optimized.dtype == self.dtype
        assert optimized.is_contiguous()
        truth = truth.double()
        finite = truth.isfinite()
        assert torch.equal(optimized.isfinite(), finite)
        assert torch.equal(optimized[~finite].isnan(), truth[~finite].isnan())
        truth = truth[finite]
        if truth.numel() == 0:
            return
        rms = truth.square().mean().sqrt().item() or 1.0
        for i, result in enumerate((optimized, original)):
            error = (result[finite].double() - truth) / rms
            error = error[error.isfinite()]  # an original may overflow where float64 does not
            self.squares[i] += error.square().sum().item()
            self.largest[i] = max(self.largest[i], error.abs().max().item() if error.numel() else 0.0)
        self.elements += truth.numel()

    def check(self) -> None:
        """Assert the gate over everything added."""
        assert self.elements >= 4096, f"only {self.elements} elements: too few to judge"
        optimized, original = ((s / self.elements) ** 0.5 for s in self.squares)
        allowed = self.ratio * original + self.floor
        assert optimized <= allowed, f"rms {optimized:.3e}, original {original:.3e}, allowed {allowed:.3e}"
        bound = 8 * max(self.largest[1], self.floor)
        assert self.largest[0] <= bound, f"largest {self.largest[0]:.3e}, allowed {bound:.3e}"
