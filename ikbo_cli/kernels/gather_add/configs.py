"""Blocks of gather_add."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GatherAddConfig:
    """Rows and columns of a block."""

    block_r: int
    block_n: int
    num_warps: int


def gather_add_config(columns: int) -> GatherAddConfig:
    """Configuration for `N` columns: about 2,048 elements a program, whole rows where they fit."""
    block_n = min(1024, max(16, 1 << (int(columns) - 1).bit_length() if columns > 0 else 16))
    return GatherAddConfig(max(1, 2048 // block_n), block_n, 4)


SHIPPED = tuple(gather_add_config(n) for n in (16, 128, 1024))
