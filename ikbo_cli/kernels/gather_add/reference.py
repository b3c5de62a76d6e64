"""Gather and add, written out."""

from __future__ import annotations

from torch import Tensor

from ikbo_cli.kernels.shared.activation import apply_activation


def gather_add_reference(
    x_cand: Tensor, addend: Tensor, index: Tensor, bias: Tensor | None = None, act: str = "none"
) -> Tensor:
    """`act(x_cand + addend[index] + bias)`, in the promoted dtype of the inputs.

    Args:
        x_cand: `[B, *, N]`.
        addend: `[U, *, N]`.
        index: `[B]`, values in `[0, U)`.
        bias: `[N]` or None.
        act: Name of the activation.

    Returns:
        `[B, *, N]`.
    """
    out = x_cand + addend[index]
    return apply_activation(out if bias is None else out + bias, act)
