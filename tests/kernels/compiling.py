"""Compile kernels for a GPU that is not there, through their real launch functions; in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMITS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes of shared memory a program may have."""


class AbsentDriver:
    """What the launcher asks of a driver before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Compiled:
    """Resources of one compiled kernel."""

    name: str
    shared_bytes: int
    stack_bytes: int
    text: str

    def count(self, instruction: str) -> int:
        return self.text.count(instruction)


def collect(target: str) -> list[Compiled]:
    """Let every launch from now on compile for `target` instead of running; the list fills as they do."""
    found: list[Compiled] = []
    triton.runtime.driver.set_active(AbsentDriver(TARGETS[target]))

    def compile_only(kernel: Any, grid: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            compiled = kernel.warmup(*args, grid=grid, enable_fp_fusion=True, **kwargs)
            found.append(resources(kernel.__name__, compiled))

        return call

    JITFunction.__getitem__ = compile_only
    return found


def resources(name: str, compiled: Any) -> Compiled:
    """Shared memory, spills in bytes a thread, and assembly of a compiled kernel."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        spills = re.search(r"vgpr_spill_count:\s*(\d+)", text)
        return Compiled(name, compiled.metadata.shared, 4 * int(spills[1]) if spills else 0, text)
    tools = Path(os.path.dirname(triton.__file__)) / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tools / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    stack = re.search(r"STACK:(\d+)", usage)
    assert stack is not None, usage
    return Compiled(name, compiled.metadata.shared, int(stack[1]), compiled.asm["ptx"])
