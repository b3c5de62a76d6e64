"""Blocks of the DIN unit."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DinConfig:
    """Keys a block and warps a program."""

    block_l: int
    num_warps: int
    num_stages: int


SHIPPED_16 = (DinConfig(64, 4, 2), DinConfig(64, 8, 2), DinConfig(32, 8, 2))
SHIPPED_32 = (DinConfig(16, 4, 2),)


def fits(depth: int, units: int) -> bool:
    """Whether one program holds a unit with keys of `D` numbers and layers of at most `units`."""
    return 0 < depth <= 128 and units > 0 and (units <= 128 or (units <= 256 and depth <= 64))


def din_config(dtype: torch.dtype, depth: int, units: int) -> DinConfig:
    """Configuration by D and the widest layer alone, so that a result never depends on the batch."""
    if dtype == torch.float32:
        return SHIPPED_32[0]
    if units > 128:
        return SHIPPED_16[2]
    return SHIPPED_16[0] if depth <= 64 else SHIPPED_16[1]


def unit_blocks(units: int) -> tuple[int, int]:
    """Two powers of two (the second may be 0) that cover a layer: 80 is 64 + 16.

    Args:
        units: Width of the layer, at least 1.
    """
    first = 16
    while first * 2 <= units:
        first *= 2
    rest = units - first
    if rest <= 0:
        return first, 0
    second = 16
    while second < rest:
        second *= 2
    return (first * 2, 0) if second == first else (first, second)
