"""Tiles of the candidate GEMM, and where a library GEMM with a gathered add is faster (measured)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LinearConfig:
    """Tile `[block_m, block_n]`, `block_k` deep; `halves`: epilogue in two column halves (0 or 1)."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    halves: int = 1


SHIPPED_16 = (
    LinearConfig(128, 256, 64, 8, 3),
    LinearConfig(256, 128, 64, 8, 3),
    LinearConfig(128, 128, 64, 8, 4),
    LinearConfig(128, 128, 64, 4, 3),
    LinearConfig(128, 64, 64, 4, 4),
    LinearConfig(64, 128, 64, 4, 4),
    LinearConfig(64, 64, 64, 4, 4),
)
"""16-bit tiles for Hopper and later, largest first."""

SHIPPED_PORTABLE = (LinearConfig(128, 128, 32, 8, 3), LinearConfig(64, 64, 32, 4, 3))
"""16-bit tiles for other devices."""

SHIPPED_32 = (LinearConfig(64, 64, 32, 8, 2),)
"""float32 tiles."""


def linear_config(dtype: torch.dtype, rows: int, columns: int, capability: int) -> LinearConfig:
    """Tile for `rows` x `columns` outputs: the largest that still gives every multiprocessor a tile.

    Args:
        dtype: Of the operands.
        rows: Candidate rows, as a plain number (a hint where symbolic).
        columns: `N`.
        capability: `10 * major + minor`; 0 for AMD.
    """
    if dtype == torch.float32:
        return SHIPPED_32[0]
    choices = SHIPPED_16 if capability >= 90 else SHIPPED_PORTABLE
    for config in choices:
        wasted = columns % config.block_n
        if columns < config.block_n or (0 < wasted <= config.block_n // 2 and columns < 4 * config.block_n):
            continue
        if -(-rows // config.block_m) * -(-columns // config.block_n) >= 132:
            return config
    return choices[-1]
