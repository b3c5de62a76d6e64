"""The gate: the optimized program's error against the original's own error, both against float64, pooled."""

from __future__ import annotations

import dataclasses

import torch

POOL = 4096
"""Elements an output needs before its RMS error means something."""
MAX_ABS_FACTOR = 8.0
FLOAT32_RATIO, FLOAT32_FLOOR = 2.0, 1.0
HALF_RATIO, HALF_FLOOR = 1.25, 0.01
ROUNDED_RATIO = 2.0
EQUIVALENCE = 1e-9
"""Largest relative difference of the two programs when both are interpreted in float64."""


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


def gate_for(dtype: torch.dtype, *, rounded: bool) -> Gate:
    """The gate of a program's dtype; `rounded`: a rewrite had to round a partial sum to 16 bits."""
    if dtype in (torch.float16, torch.bfloat16):
        return Gate(ROUNDED_RATIO if rounded else HALF_RATIO, HALF_FLOOR, torch.finfo(dtype).eps)
    return Gate(FLOAT32_RATIO, FLOAT32_FLOOR, torch.finfo(torch.float32).eps)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of one output in one case."""

    passed: bool
    allowed: float
    rms_original: float
    rms_optimized: float
    max_abs: float
    reason: str | None


def compare_output(
    reference: list[torch.Tensor], original: list[torch.Tensor], optimized: list[torch.Tensor], gate: Gate
) -> Outcome:
    """Compare one output over all draws of a case; shapes and dtypes must agree draw by draw."""
    for r, a, b in zip(reference, original, optimized, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return _failed(f"shape or dtype differs: {tuple(a.shape)} {a.dtype}, {tuple(b.shape)} {b.dtype}")
        if not a.dtype.is_floating_point:
            wrong = (a != b).nonzero()
            if len(wrong):
                return _failed(f"integer output differs at {tuple(wrong[0].tolist())}")
            continue
        same = (a.isnan() == b.isnan()) & (a.isinf() == b.isinf())
        if not bool(same.all()):
            return _failed(f"NaN or infinity differs at {tuple((~same).nonzero()[0].tolist())}")
        del r
    if not original or not original[0].dtype.is_floating_point:
        return Outcome(True, 0.0, 0.0, 0.0, 0.0, None)
    truth = torch.cat([r.double().flatten() for r in reference])
    finite = truth.isfinite()
    truth = truth[finite]
    error_a = torch.cat([t.double().flatten() for t in original])[finite] - truth
    error_b = torch.cat([t.double().flatten() for t in optimized])[finite] - truth
    if truth.numel() == 0:
        return Outcome(True, 0.0, 0.0, 0.0, 0.0, None)
    scale = float(truth.square().mean().sqrt())
    rms_a, rms_b = float(error_a.square().mean().sqrt()), float(error_b.square().mean().sqrt())
    allowed = gate.ratio * rms_a + gate.floor * gate.eps * scale
    largest, bound = (
        float(error_b.abs().max()),
        MAX_ABS_FACTOR * max(float(error_a.abs().max()), gate.eps * scale),
    )
    reason = None
    if not rms_b <= allowed:
        reason = f"RMS error {rms_b:.3g} exceeds {allowed:.3g}"
    elif not largest <= bound:
        reason = f"largest error {largest:.3g} exceeds {bound:.3g}, at flat position {int(error_b.abs().argmax())}"
    return Outcome(reason is None, allowed, rms_a, rms_b, largest, reason)


def _failed(reason: str) -> Outcome:
    return Outcome(False, 0.0, 0.0, float("inf"), float("inf"), reason)


def equivalence(left: list[torch.Tensor], right: list[torch.Tensor]) -> str | None:
    """Why two float64 interpretations differ, or None if they agree to rounding."""
    for position, (a, b) in enumerate(zip(left, right, strict=True)):
        if a.shape != b.shape:
            return f"output {position}: shape {tuple(a.shape)} against {tuple(b.shape)}"
        if not a.dtype.is_floating_point:
            if not torch.equal(a, b):
                return f"output {position}: integer values differ"
            continue
        scale = float(a.nan_to_num(0, 0, 0).abs().max()) if a.numel() else 0.0
        if not torch.allclose(a, b, rtol=EQUIVALENCE, atol=EQUIVALENCE * scale, equal_nan=True):
            return f"output {position}: differs in float64 by {float((a - b).abs().max()):.3g}"
    return None
