"""Tiles of target attention, chosen by L, D, S and dtype alone: scores must not change with the batch."""

from __future__ import annotations

from dataclasses import dataclass

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
        programs: Programs a multiprocessor, each taking every n-th tile; 0: a program for each tile.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    span: int = 0
    tma: int = 0
    programs: int = 0


def attention_config(dtype: torch.dtype, head: int, steps: int, capability: int) -> AttentionConfig:
    """Configuration for a head size, query steps a candidate and compute capability (90: Hopper).

    Args:
        dtype: Of q, k and v.
        head: `D`, 1 to 256.
        steps: `S`.
        capability: `10 * major + minor`; 0 for AMD.
    """
    span = 256 if steps <= 4 else 0
    if dtype == torch.float32:
        return AttentionConfig(16 if head > 128 else 32, 16, 4, 2, span)
    if capability >= 90:
        if head <= 64:
            return AttentionConfig(64 if span else 128, 64, 4 if span else 8, 3, span)
        if head <= 128:
            return AttentionConfig(64 if span else 128, 64, 4 if span else 8, 3, span)
        return AttentionConfig(64, 32, 8, 2, span)
    return AttentionConfig(64, 64 if head <= 64 else 32, 4 if head <= 128 else 8, 2, span)


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


SHIPPED: tuple[tuple[str, int, AttentionConfig], ...] = ()
