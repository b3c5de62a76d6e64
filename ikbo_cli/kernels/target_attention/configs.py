"""Tiles of target attention, chosen by L, D, S and dtype alone: scores must not change with the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class AttentionConfig:
    """A tile of query rows and keys.

    Attributes:
        block_m: Query rows.
        block_n: Keys.
        num_warps: Warps of a program.
        num_stages: Blocks of keys in flight.
        span: Keys a part at least; 0: all keys in one part.
        tma: 1: keys and values through the tensor memory accelerator where their layout allows it.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    span: int = 0
    tma: int = 0


SHIPPED_HOPPER = (
    AttentionConfig(64, 64, 4, 3, tma=1),
    AttentionConfig(64, 128, 4, 3, tma=1),
    AttentionConfig(64, 32, 8, 2),
)
"""16-bit tiles for Hopper and later: many query steps, few, head sizes above 128."""

SHIPPED_PORTABLE = (AttentionConfig(64, 32, 4, 2), AttentionConfig(64, 32, 8, 2))
"""16-bit tiles for other devices: head sizes up to 128, and above."""

SHIPPED_32 = (AttentionConfig(32, 16, 4, 2), AttentionConfig(16, 16, 4, 2))
"""float32 tiles: head sizes up to 64, and above."""

SPLIT_SPAN = 1024
"""Keys a part at least, where keys are split: writing and combining parts costs as much as reading 512 keys."""

FEW_STEPS = 4
"""Query steps up to which a candidate's keys may be split into parts: more steps fill the device by themselves."""


def attention_config(dtype: torch.dtype, head: int, steps: int, capability: int) -> AttentionConfig:
    """Configuration for a head size, query steps a candidate and compute capability (90: Hopper).

    Args:
        dtype: Of q, k and v.
        head: `D`, 1 to 256.
        steps: `S`.
        capability: `10 * major + minor`; 0 for AMD.
    """
    if dtype == torch.float32:
        choice = SHIPPED_32[1 if head > 64 else 0]
    elif capability < 90:
        choice = SHIPPED_PORTABLE[1 if head > 128 else 0]
    elif head > 128:
        choice = SHIPPED_HOPPER[2]
    else:
        # one step a candidate is bound by the latency of a tile's chain: fewer, longer blocks of keys
        choice = SHIPPED_HOPPER[1 if steps <= FEW_STEPS else 0]
    return replace(choice, span=SPLIT_SPAN) if steps <= FEW_STEPS else choice


def part_span(config: AttentionConfig, keys: int) -> int:
    """Keys a part: at least the configuration's span, and at most 16 parts.

    Args:
        config: The configuration.
        keys: `L`.

    Returns:
        A multiple of `block_n`, or 0 where all keys are one part.
    """
    if config.span == 0:
        return 0
    sixteenth = (keys + 16 * config.block_n - 1) // (16 * config.block_n) * config.block_n
    return max(config.span, sixteenth)
