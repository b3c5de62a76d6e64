"""What a device can do: peaks from vendors' data sheets, achieved fractions and CPU rates from measurement."""

from __future__ import annotations

import dataclasses

import torch

from ikbo_cli.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Device:
    """Rates that turn FLOPs and bytes into time.

    Attributes:
        name: As given to `--device`.
        kind: `cpu` or `gpu`.
        gemm_tflops: Achieved matrix rate by dtype name, for large aligned operands.
        unaligned: Fraction of it where K or N of a 16-bit operand is no multiple of 8 elements.
        memory_gb_per_s: Achieved rate of a large copy, bytes read plus bytes written.
        launch_us: Cost of one more kernel (under a CUDA graph on a GPU, dispatch on a CPU).
        vector_gflops: Rate of simple arithmetic outside matrix units.
        source: Where the figures come from.
    """

    name: str
    kind: str
    gemm_tflops: dict[str, float]
    unaligned: float
    memory_gb_per_s: float
    launch_us: float
    vector_gflops: float
    source: str

    def gemm_rate(self, dtype: torch.dtype) -> float:
        """FLOP per microsecond of a large matrix product."""
        return self.gemm_tflops.get(_name(dtype), self.gemm_tflops["float32"]) * 1e6

    def balance(self, dtype: torch.dtype) -> float:
        """FLOP per byte below which the device waits for memory."""
        return self.gemm_rate(dtype) / (self.memory_gb_per_s * 1e3)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gpu(name: str, dense16: float, fp32: float, copy: float, source: str) -> Device:
    return Device(
        name,
        "gpu",
        {"bfloat16": dense16, "float16": dense16, "float32": fp32},
        0.3,
        copy,
        1.5,
        fp32 * 1e3,
        source,
    )


# GPUs: 0.7 of the dense 16-bit peak and 0.9 of the memory bandwidth of the data sheet, the fractions that one H200
# reached (700 TFLOP/s in an 8192^3 product, 4.27 TB/s in a copy); unaligned K reached 0.3 of the aligned rate there.
_DEVICES = {
    "h200": _gpu("h200", 700, 60, 4270, "measured on one H200: 8192^3 product, copy; NVIDIA H200 data sheet"),
    "h100": _gpu("h100", 700, 60, 3000, "NVIDIA H100 SXM data sheet: 989 TFLOP/s, 3.35 TB/s"),
    "a100": _gpu("a100", 218, 17, 1830, "NVIDIA A100 80 GB data sheet: 312 TFLOP/s, 2.04 TB/s"),
    "b200": _gpu("b200", 1570, 70, 7200, "NVIDIA B200 data sheet: 2250 TFLOP/s, 8 TB/s"),
    "mi300x": _gpu("mi300x", 915, 110, 4770, "AMD MI300X data sheet: 1307 TFLOP/s, 5.3 TB/s"),
}

# One core of an x86-64 server, AVX-512, measured single-threaded with torch 2.13: linear 1024 x 2044 x 433 at
# 100 GFLOP/s, in-cache pointwise at 120 GB/s.
_CORE_GEMM_TFLOPS = 0.1
_CORE_GB_PER_S = 60.0
SECOND_CORE = 0.85
"""What each further core adds, as a fraction of the first."""


def _cpu(threads: int) -> Device:
    cores = 1 + SECOND_CORE * (threads - 1)
    gemm = _CORE_GEMM_TFLOPS * cores
    rates = {"float32": gemm, "float64": gemm / 2, "bfloat16": gemm, "float16": gemm}
    source = "measured on one core of an x86-64 server, scaled by threads"
    return Device("cpu", "cpu", rates, 1.0, _CORE_GB_PER_S * cores, 1.5, 12 * cores, source)


def get_device(name: str, threads: int | None = None) -> Device:
    """The device of a name; `local` is the GPU if there is one, else this CPU. Nothing is measured here.

    Raises:
        UsageError: an unknown name.
    """
    if name == "local":
        if torch.cuda.is_available():
            title = torch.cuda.get_device_name().lower()
            return next((device for key, device in _DEVICES.items() if key in title), _DEVICES["a100"])
        name = "cpu"
    if name == "cpu":
        return _cpu(threads or torch.get_num_threads())
    if name not in _DEVICES:
        raise UsageError(f"unknown device {name!r}", hint="one of: local, cpu, " + ", ".join(_DEVICES))
    return _DEVICES[name]
