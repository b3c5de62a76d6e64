"""What every command returns: frozen dataclasses whose JSON is what the command line prints.

The field names are the JSON schema (`schema_version` 1); fields may be added, never renamed within a version.
Units live in the names: `_us` microseconds, `_bytes`, `flops` floating-point operations (a multiply-add is two).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

SCHEMA_VERSION = 1

Side = Literal["user", "candidate", "index", "packed", "shared"]
How = Literal["graph", "declared", "sample"]
Status = Literal["rewritten", "declined", "refused", "unsupported"]


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """The file that was read. `format` is `pt2`, `torchscript` or `onnx`."""

    path: str
    format: str
    sha256: str


@dataclasses.dataclass(frozen=True)
class Workload:
    """Effective sizes: `batch` candidates, `users`, their `ratio`; `assumed` when the user gave neither."""

    batch: int
    users: int
    ratio: float
    device: str
    dtype: str
    assumed: bool = False
    fixed_by: str | None = None


@dataclasses.dataclass(frozen=True)
class InputInfo:
    """One tensor input of the program. `shape` holds ints, or the names of symbolic dims."""

    name: str
    side: Side
    how: How
    shape: tuple[int | str, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Cost:
    """Estimated cost on the device. `bound` says what limits it: `compute`, `memory` or `launch`."""

    flops: float
    bytes: float
    time_us: float
    bound: str = "memory"


@dataclasses.dataclass(frozen=True)
class Site:
    """One mixing op (or output) that reads an expanded user value."""

    id: str
    source_id: str
    kind: str
    op: str
    node: str
    module: str | None
    source: str | None
    user_shape: tuple[int, ...]
    expanded_shape: tuple[int, ...]
    materialized_bytes: int
    rule: str | None
    status: Status
    reason: str | None
    before: Cost | None
    after: Cost | None


@dataclasses.dataclass(frozen=True)
class Totals:
    """Cost of a whole program. `peak_bytes` includes weights; `kernels` counts launches after fusion."""

    flops: float
    bytes: float
    peak_bytes: int
    time_us: float
    kernels: int


@dataclasses.dataclass(frozen=True)
class BeforeAfter:
    """Totals of the original and of the program that `transform` would write."""

    before: Totals
    after: Totals


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """Estimated speedup at one ratio (batch fixed; above it, batch = ratio and one user)."""

    ratio: int
    speedup: float


@dataclasses.dataclass(frozen=True)
class AnalyzeResult:
    """Result of `ikbo analyze`. `break_even_ratio` is None when the rewrite never pays."""

    model: ModelInfo
    workload: Workload
    inputs: tuple[InputInfo, ...]
    sites: tuple[Site, ...]
    user_only: Cost
    totals: BeforeAfter
    speedup_estimate: float
    break_even_ratio: float | None
    curve: tuple[CurvePoint, ...]
    unknown_ops: dict[str, int]
    balance_flop_per_byte: float
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION


@dataclasses.dataclass(frozen=True)
class VerifyCase:
    """One ratio case. `gate` is the allowed RMS error; `selections_differ` counts rows within the gate."""

    name: str
    batch: int
    users: int
    passed: bool
    gate: float
    rms_original: float
    rms_optimized: float
    max_abs: float
    selections_differ: int
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class SpeedResult:
    """Interleaved timing of original against optimized; medians in microseconds, `spread` is IQR / median."""

    mode: str
    device: str
    threads: int
    batch: int
    users: int
    original_us: float
    optimized_us: float
    speedup: float
    estimated_speedup: float | None
    spread: float


@dataclasses.dataclass(frozen=True)
class PeakBytes:
    """Measured peak memory of one call, in bytes."""

    original: int
    optimized: int


@dataclasses.dataclass(frozen=True)
class VerifyResult:
    """Result of `ikbo verify`. `not_applicable` lists cases that the program's form cannot express."""

    original: str
    optimized: str
    passed: bool
    cases: tuple[VerifyCase, ...]
    speed: tuple[SpeedResult, ...]
    peak_bytes: PeakBytes | None
    gate: str
    seed: int
    worst: str | None = None
    bisect: str | None = None
    not_applicable: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION


@dataclasses.dataclass(frozen=True)
class TransformResult:
    """Result of `ikbo transform`. `signature` maps each input of the result to its shape, in flat order."""

    model: ModelInfo
    workload: Workload
    output: str
    written: bool
    changed: bool
    signature: tuple[InputInfo, ...]
    rewritten: tuple[Site, ...]
    declined: tuple[Site, ...]
    refused: tuple[Site, ...]
    totals: BeforeAfter
    speedup_estimate: float
    verify: VerifyResult | None
    reason: str | None = None
    usage: str = ""
    diff: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = ()
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION


def to_json(result: Any) -> Any:
    """Turn a result (or any part of one) into JSON-ready values; infinities and NaN become None."""
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {f.name: to_json(getattr(result, f.name)) for f in dataclasses.fields(result)}
    if isinstance(result, dict):
        return {str(key): to_json(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [to_json(item) for item in result]
    if isinstance(result, float) and not math.isfinite(result):
        return None
    return result


@dataclasses.dataclass(frozen=True)
class Declarations:
    """What the caller declares of a program's inputs.

    Attributes:
        user_inputs: Names or globs of inputs that repeat user rows (form F3).
        index: Name of an existing input that is the index; None adds `cand_to_user_index`.
        index_dtype: `int64` or `int32`, for an added index.
    """

    user_inputs: tuple[str, ...] = ()
    index: str | None = None
    index_dtype: str = "int64"


@dataclasses.dataclass(frozen=True)
class Backend:
    """One kernel backend: whether it can be used here, and why not."""

    name: str
    available: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class DoctorResult:
    """Result of `ikbo doctor`."""

    versions: dict[str, str]
    device: str
    backends: tuple[Backend, ...]
    schema_version: int = SCHEMA_VERSION
