"""Blocks of the dot interaction."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DotConfig:
    """Depth of a block of D and warps of a program."""

    block_d: int
    num_warps: int


SHIPPED_16 = (DotConfig(128, 4), DotConfig(64, 4))
SHIPPED_32 = (DotConfig(16, 4),)

MAX_FIELDS = 128
"""Fields (user plus candidate) up to which one program holds all products of a pair."""


def dot_config(dtype: torch.dtype, depth: int) -> DotConfig:
    """Configuration for fields of `D` numbers."""
    if dtype == torch.float32:
        return SHIPPED_32[0]
    return SHIPPED_16[0] if depth > 64 else SHIPPED_16[1]
