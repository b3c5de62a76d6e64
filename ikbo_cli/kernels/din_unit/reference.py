"""The DIN attention unit with its four-way input written out."""

from __future__ import annotations

import torch
from torch import Tensor

from ikbo_cli.kernels.shared.activation import apply_activation


def din_activation(x: Tensor, act: str, params: Tensor | None) -> Tensor:
    """Activation of `x [..., N]`, also `prelu` (`params [1, N]`: slope) and `dice` (3 rows).

    Dice with inference statistics is `x * (slope + p * (1 - slope))`, `p = sigmoid(x * scale + shift)`,
    `scale = (var + eps) ** -0.5`, `shift = -mean * scale`.
    """
    if act == "prelu" and params is not None:
        return torch.where(x < 0, x * params[0].to(x.dtype), x)
    if act == "dice" and params is not None:
        slope, scale, shift = params.to(x.dtype).unbind(0)
        return x * (slope + torch.sigmoid(x * scale + shift) * (1 - slope))
    return apply_activation(x, act)


def din_unit_reference(
    q: Tensor,
    k: Tensor,
    index: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None = None,
    w2: Tensor | None = None,
    b2: Tensor | None = None,
    act: str = "sigmoid",
    params1: Tensor | None = None,
    params2: Tensor | None = None,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    softmax: bool = False,
    scale: float = 1.0,
    nan_if_empty: bool = False,
) -> Tensor:
    """`sum_l score_l k_l`, `score = MLP([q, k, q - k, q * k])`, in the dtype of the inputs.

    Args:
        q: `[B, D]`.
        k: `[U, L, D]`; rows beyond a user's length are never read, whatever they hold.
        index: `[B]`, values in `[0, U)`.
        w1: `[H1, 4 D]`.
        b1: `[H1]` or None.
        w_out: `[1, H2]`, `[1, H1]` without a second layer.
        b_out: `[1]` or None.
        w2: `[H2, H1]` or None.
        b2: `[H2]` or None.
        act: Name of the hidden activation.
        params1: Parameters of the first activation, `[3, H1]` or `[1, H1]`, or None.
        params2: Of the second.
        lengths: `[U]` or None.
        mask: `[U, L]`, bool (True: keep) or, with `softmax`, additive.
        softmax: Normalize scores over the kept keys.
        scale: Multiplies the scores.
        nan_if_empty: With `softmax`, what a user without keys gives: NaN, else zeros.

    Returns:
        `[B, D]`.
    """
    users, keys = k.shape[:2]
    kept = torch.ones(users, keys, dtype=torch.bool, device=k.device)
    if lengths is not None:
        kept &= torch.arange(keys, device=k.device) < lengths[:, None]
        k = k.masked_fill(~kept[:, :, None], 0.0)
    if mask is not None and mask.dtype == torch.bool:
        kept = kept & mask
    row = k[index]
    query = q[:, None, :].expand_as(row)
    x = torch.cat([query, row, query - row, query * row], -1)
    x = din_activation(torch.nn.functional.linear(x, w1, b1), act, params1)
    if w2 is not None:
        x = din_activation(torch.nn.functional.linear(x, w2, b2), act, params2)
    score = torch.nn.functional.linear(x, w_out, b_out)[..., 0] * scale
    if mask is not None and mask.dtype != torch.bool:
        score = score + mask[index].to(score.dtype)
    kept = kept[index]
    if not softmax:
        return torch.einsum("bl,bld->bd", score.masked_fill(~kept, 0.0), row)
    score = score.masked_fill(~kept, float("-inf"))
    out = torch.einsum("bl,bld->bd", torch.softmax(score, 1), row)
    empty = (score == float("-inf")).all(1)
    return out.masked_fill(empty[:, None], float("nan") if nan_if_empty else 0.0)
