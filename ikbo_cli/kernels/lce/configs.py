"""Tiles of linear compression, and where the decomposition by library products is faster (measured)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LceConfig:
    """A tile of outputs.

    Attributes:
        block_m: Rows.
        block_n: Columns.
        block_k: Depth of a step.
        num_warps: Warps of a program.
        num_stages: Steps in flight.
        halves: 1: the epilogue takes the columns in two halves, which keeps it out of local memory.
        tma: 1: operands through the tensor memory accelerator where their layout allows it.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    halves: int = 1
    tma: int = 0


SHIPPED_16 = (
    LceConfig(128, 256, 64, 8, 4, tma=1),
    LceConfig(128, 128, 64, 8, 4, tma=1),
    LceConfig(64, 128, 64, 4, 4, tma=1),
    LceConfig(64, 64, 64, 4, 4, tma=1),
)
"""16-bit tiles for Hopper and later."""

SHIPPED_PORTABLE = (LceConfig(128, 128, 32, 8, 3), LceConfig(64, 64, 32, 4, 3))
"""16-bit tiles for other devices."""

SHIPPED_32 = (LceConfig(64, 64, 32, 8, 2),)
"""float32 tiles."""


def lce_config(dtype: torch.dtype, rows: int, columns: int, capability: int, small: bool = False) -> LceConfig:
    """Tile for outputs `[B, M, N]`.

    Args:
        dtype: Of the operands.
        rows: `M`.
        columns: `N`.
        capability: `10 * major + minor`; 0 for AMD.
        small: Few products (a user stage): smaller tiles, so that more multiprocessors work.
    """
    if dtype == torch.float32:
        return SHIPPED_32[0]
    choices = SHIPPED_16 if capability >= 90 else SHIPPED_PORTABLE
    if small:
        choices = choices[-2:]
    for config in choices:
        if config.block_m <= max(rows, 64) and config.block_n <= max(columns, 64):
            return config
    return choices[-1]


def last_rows(config: LceConfig, rows: int) -> int:
    """Height of the last tile of M: the smallest power of two, 64 at least, that holds the rest."""
    rest = rows % config.block_m
    height = 64
    while height < rest:
        height *= 2
    return min(height, config.block_m) if rest else config.block_m
