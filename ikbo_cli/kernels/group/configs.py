"""Sizes of the grouping kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupConfig:
    """Rows a program ranks (`block`) against `chunk` others at a time; powers of two, block the smaller."""

    block: int
    chunk: int
    num_warps: int
    width: int = 32


RANK = GroupConfig(block=16, chunk=512, num_warps=4)
"""One launch, every candidate against every other."""

MERGE = GroupConfig(block=16, chunk=256, num_warps=4)
"""Two launches: sorted chunks, then merged by binary search."""

RANK_LIMIT = 4096
"""Candidates (and users) up to which the one-launch form is used."""

MERGE_LIMIT = 131_072
"""Candidates up to which the two-launch form is used; above, a library sort."""
