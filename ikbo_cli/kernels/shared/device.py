"""What a launch needs to know of the device: compute capability, float32 matmul precision."""

from __future__ import annotations

import sys

import torch
from torch import Tensor


def capability(tensor: Tensor) -> int:
    """`10 * major + minor` of a CUDA tensor's device (90: Hopper); 0 on AMD and on the CPU."""
    if not tensor.is_cuda or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


def packaging() -> bool:
    """Whether a program is being compiled ahead of time, into a package that runs without Python."""
    virtualized = sys.modules.get("torch._inductor.virtualized")
    return virtualized is not None and virtualized.V.aot_compilation is True


def dot_precision(dtype: torch.dtype) -> str:
    """Triton's `input_precision` of a product: tf32 for float32 where torch allows it, else exact."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return "ieee"


def cdiv(a: int, b: int) -> int:
    """`ceil(a / b)`, also of symbolic sizes."""
    return (a + b - 1) // b


def power_of_two(n: int, at_least: int = 16) -> int:
    """Smallest power of two that is at least `n` and `at_least`."""
    return max(at_least, 1 << (int(n) - 1).bit_length()) if n > 0 else at_least
