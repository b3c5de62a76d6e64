"""What this machine offers: versions, device, and which kernel backends can be used."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

import ikbo_cli
from ikbo_cli.results import Backend, DoctorResult


def doctor() -> DoctorResult:
    """Versions, device, and the backends available here, each with the reason."""
    versions = {"ikbo-cli": ikbo_cli.__version__, "python": platform.python_version()}
    for name in ("torch", "triton", "onnx", "onnxruntime"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    triton = versions["triton"] != "not installed"
    reason = "ready" if cuda and triton else "no CUDA device" if triton else "triton is not installed"
    return DoctorResult(
        versions,
        device,
        (Backend("aten", True, "plain PyTorch, runs anywhere"), Backend("triton", cuda and triton, reason)),
    )
