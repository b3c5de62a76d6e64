"""The gate: the optimized program's error against the original's own error, both against float64, pooled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

POOL = 4096
"""Elements an output needs before its RMS error means something."""
MAX_ABS_FACTOR = 8.0
FLOAT32_RATIO, FLOAT32_FLOOR = 2.0, 1.0
HALF_RATIO, HALF_FLOOR = 1.25, 0.01
ROUNDED_RATIO = 2.0
EQUIVALENCE = 1e-9
"""Largest relative difference of two values that are equal in exact arithmetic, when computed in float64."""


@dataclasses.dataclass(frozen=True)
class Gate:
    """`rms(optimized) <= ratio * rms(original) + floor * eps * rms(reference)`."""

    ratio: float
    floor: float
    eps: float

    def __str__(self) -> str:
        """As printed in reports."""
        bound = f"{self.ratio:g} x rms(original) + {self.floor:g} eps x rms(reference)"
        return f"rms(optimized) <= {bound}, largest error <= {MAX_ABS_FACTOR:g}x"

    def least(self, scale: float) -> float:
        """The error that is always allowed, of values whose RMS is `scale`."""
        return self.floor * self.eps * scale

    def largest(self, error: float, scale: float) -> float:
        """The largest allowed error of one element, where the original's largest is `error`."""
        return MAX_ABS_FACTOR * max(error, self.least(scale))


def gate_for(dtype: torch.dtype, *, rounded: bool) -> Gate:
    """The gate of a program's dtype; `rounded`: a rewrite had to round a partial sum to 16 bits."""
    if dtype in (torch.float16, torch.bfloat16):
        return Gate(ROUNDED_RATIO if rounded else HALF_RATIO, HALF_FLOOR, torch.finfo(dtype).eps)
    return Gate(FLOAT32_RATIO, FLOAT32_FLOOR, torch.finfo(torch.float32).eps)


@dataclasses.dataclass(frozen=True)
class Draw:
    """One output in one draw.

    Attributes:
        seed: Seed of the draw.
        original: The original's output.
        optimized: The optimized program's output.
        original_truth: The original in float64 (replaying its own selections, where it has any).
        optimized_truth: What the optimized output is held to: the same, or its own where it selected differently.
        excused: Booleans of the output's shape: elements where the two programs selected differently; None for none.
    """

    seed: int
    original: torch.Tensor
    optimized: torch.Tensor
    original_truth: torch.Tensor
    optimized_truth: torch.Tensor
    excused: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of one output in one case; `reason` says why it failed and at which element."""

    passed: bool
    allowed: float
    rms_original: float
    rms_optimized: float
    max_abs: float
    reason: str | None

    @property
    def badness(self) -> float:
        """How close to failing, or how far beyond, for naming the worst output."""
        if not self.passed:
            return float("inf")
        return self.rms_optimized / self.allowed if self.allowed else 0.0


def compare_output(draws: Sequence[Draw], gate: Gate) -> Outcome:
    """Compare one output over all draws of a case; everything but the RMS holds draw by draw."""
    for draw in draws:
        reason = _pattern(draw)
        if reason is not None:
            return Outcome(False, 0.0, 0.0, float("inf"), float("inf"), reason)
    if not draws[0].original.dtype.is_floating_point:
        return Outcome(True, 0.0, 0.0, 0.0, 0.0, None)
    # Elements that are infinite or NaN in both programs have been compared above.
    kept = [d.original.isfinite() & d.optimized.isfinite() & d.original_truth.isfinite() for d in draws]
    truth = torch.cat([d.original_truth[k] for d, k in zip(draws, kept, strict=True)]).double()
    if truth.numel() == 0:
        return Outcome(True, 0.0, 0.0, 0.0, 0.0, None)
    first = torch.cat([d.original[k].double() - d.original_truth[k] for d, k in zip(draws, kept, strict=True)])
    second = [
        (d.optimized.double() - d.optimized_truth).nan_to_num(0, 0, 0) * k for d, k in zip(draws, kept, strict=True)
    ]
    scale, rms_a = rms(truth), rms(first)
    rms_b = rms(torch.cat([e[k] for e, k in zip(second, kept, strict=True)]))
    allowed = gate.ratio * rms_a + gate.least(scale)
    largest, where = _worst(draws, second)
    bound = gate.largest(float(first.abs().max()), scale)
    reason = None
    if not rms_b <= allowed:
        reason = f"RMS error {rms_b:.3g} exceeds {allowed:.3g}; largest {largest:.3g} at {where}"
    elif not largest <= bound:
        reason = f"error {largest:.3g} exceeds {bound:.3g} at {where}"
    return Outcome(reason is None, allowed, rms_a, rms_b, largest, reason)


def _pattern(draw: Draw) -> str | None:
    """Shape, dtype, whole numbers, NaN and infinity: what must be equal exactly."""
    a, b = draw.original, draw.optimized
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"shape or dtype differs: {_describe(a)} in the original, {_describe(b)} in the optimized program"
    free = torch.zeros_like(a, dtype=torch.bool) if draw.excused is None else draw.excused
    if not a.dtype.is_floating_point:
        wrong, what = (a != b) & ~free, "differs"
    else:
        same = torch.where(a.isinf() | b.isinf(), a == b, a.isnan() == b.isnan())
        wrong, what = ~same & ~free, "differs in NaN or infinity"
    if not bool(wrong.any()):
        return None
    place = tuple(wrong.nonzero()[0].tolist())
    return f"{what} at {_place(place, draw.seed)}: {a[place].item()} in the original, {b[place].item()} optimized"


def _worst(draws: Sequence[Draw], errors: Sequence[torch.Tensor]) -> tuple[float, str]:
    largest, where = 0.0, "no element"
    for draw, error in zip(draws, errors, strict=True):
        if error.numel() and float(error.abs().max()) > largest:
            flat = int(error.abs().argmax())
            largest = float(error.abs().max())
            where = _place(tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), error.shape)), draw.seed)
    return largest, where


def _place(position: tuple[int, ...], seed: int) -> str:
    row = f"row {position[0]}" if position else "its only element"
    more = f", position {position}" if len(position) > 1 else ""
    return f"{row}{more}, seed {seed}"


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def rms(values: torch.Tensor) -> float:
    """Root of the mean square; 0 of nothing."""
    return float(values.double().square().mean().sqrt()) if values.numel() else 0.0


def differing(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Elements in which two float64 interpretations of the same mathematics differ by more than rounding."""
    if not left.dtype.is_floating_point:
        return left != right
    size = left.nan_to_num(0, 0, 0).abs()
    scale = float(size.max()) if size.numel() else 0.0
    near = (left - right).abs() <= EQUIVALENCE * (scale + size)
    return ~(near | (left == right) | (left.isnan() & right.isnan()))
