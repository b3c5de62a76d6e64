"""Candidate linear with the user part gathered, written out."""

from __future__ import annotations

from torch import Tensor

from ikbo_cli.kernels.shared.activation import apply_activation


def linear_reference(
    x_cand: Tensor,
    w_cand: Tensor,
    index: Tensor,
    x_user: Tensor | None = None,
    w_user: Tensor | None = None,
    addend: Tensor | None = None,
    bias: Tensor | None = None,
    act: str = "none",
) -> Tensor:
    """`act(x_cand w_cand^T + (x_user w_user^T + addend)[index] + bias)`, in the dtype of the inputs.

    Args:
        x_cand: `[B, *, Kc]`.
        w_cand: `[N, Kc]`.
        index: `[B]`, values in `[0, U)`.
        x_user: `[U, *, Ku]` or None.
        w_user: `[N, Ku]` or None.
        addend: `[U, *, N]` or None.
        bias: `[N]` or None.
        act: Name of the activation.

    Returns:
        `[B, *, N]`.
    """
    out = x_cand @ w_cand.T
    if x_user is not None and w_user is not None:
        out = out + (x_user @ w_user.T)[index]
    if addend is not None:
        out = out + addend[index]
    return apply_activation(out if bias is None else out + bias, act)
