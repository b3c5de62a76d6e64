"""Grouping by a loop over users."""

from __future__ import annotations

import torch
from torch import Tensor


def group_reference(index: Tensor, users: int) -> tuple[Tensor, Tensor]:
    """Candidates of each user in their order, users ascending, those out of range last.

    Args:
        index: `[B]`, int32 or int64, on the CPU.
        users: `U`.

    Returns:
        order int32 `[B]` and offsets int32 `[U + 1]`.
    """
    groups = [[b for b, u in enumerate(index.tolist()) if u == user] for user in range(users)]
    outside = [b for b, u in enumerate(index.tolist()) if not 0 <= u < users]
    bounds = [0]
    for group in groups:
        bounds.append(bounds[-1] + len(group))
    order = [b for group in groups for b in group] + outside
    return torch.tensor(order, dtype=torch.int32), torch.tensor(bounds, dtype=torch.int32)
