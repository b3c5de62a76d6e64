"""Attention with every candidate's keys and values written out."""

from __future__ import annotations

import torch
from torch import Tensor


def target_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    nan_if_empty: bool = False,
) -> Tensor:
    """`softmax(q k[index]^T * scale + mask) v[index]`, in the dtype of the inputs.

    Args:
        q: `[B, S, H, D]`.
        k: `[U, L, H, D]`.
        v: `[U, L, H, D]`; rows beyond a user's length are never read, whatever they hold.
        index: `[B]`, values in `[0, U)`.
        lengths: `[U]`, keys of each user, or None for `L`.
        mask: `[U, L]`, bool (True: keep) or additive.
        scale: Of the scores; `D ** -0.5` when None.
        nan_if_empty: What a user without keys gives: NaN, else zeros.

    Returns:
        `[B, S, H, D]`.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    users, keys = k.shape[:2]
    kept = torch.ones(users, keys, dtype=torch.bool, device=k.device)
    if lengths is not None:
        kept &= torch.arange(keys, device=k.device) < lengths[:, None]
        k, v = (t.masked_fill(~kept[:, :, None, None], 0.0) for t in (k, v))
    bias = torch.zeros(users, keys, dtype=q.dtype, device=k.device)
    if mask is not None:
        bias = bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask.to(q.dtype)
    bias = bias.masked_fill(~kept, float("-inf"))
    scores = torch.einsum("bshd,blhd->bshl", q, k[index]) * scale + bias[index][:, None, None, :]
    out = torch.einsum("bshl,blhd->bshd", torch.softmax(scores, -1), v[index])
    empty = (bias == float("-inf")).all(-1)[index]
    return out.masked_fill(empty[:, None, None, None], float("nan") if nan_if_empty else 0.0)
