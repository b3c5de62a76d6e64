"""Pairwise dot products, written out."""

from __future__ import annotations

import torch
from torch import Tensor


def dot_interaction_reference(
    x_user: Tensor, x_cand: Tensor, index: Tensor, dense: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """User-user upper triangle a user, and the row of mixed products a candidate.

    Args:
        x_user: `[U, F_u, D]`.
        x_cand: `[B, F_c, D]`.
        index: `[B]`, values in `[0, U)`.
        dense: `[B, N]` or None.

    Returns:
        uu: `[U, F_u (F_u - 1) / 2]`.
        mixed: `[B, P]`: `F_u * F_c` user-candidate products row-major, candidate-candidate upper triangle,
            dense columns, zeros up to a multiple of 8.
    """
    batch = x_cand.shape[0]
    rows, columns = torch.triu_indices(x_user.shape[1], x_user.shape[1], 1, device=x_user.device)
    uu = (x_user @ x_user.transpose(1, 2))[:, rows, columns]
    rows, columns = torch.triu_indices(x_cand.shape[1], x_cand.shape[1], 1, device=x_cand.device)
    parts = [
        (x_user[index] @ x_cand.transpose(1, 2)).reshape(batch, x_user.shape[1] * x_cand.shape[1]),
        (x_cand @ x_cand.transpose(1, 2))[:, rows, columns],
    ]
    if dense is not None:
        parts.append(dense)
    width = sum(part.shape[1] for part in parts)
    parts.append(x_cand.new_zeros(batch, -width % 8))
    return uu, torch.cat(parts, 1)
