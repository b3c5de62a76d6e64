"""Linear compression with the user part gathered, written out."""

from __future__ import annotations

from torch import Tensor

from ikbo_cli.kernels.shared.activation import apply_activation


def lce_reference(
    e_cand: Tensor,
    w_cand: Tensor,
    index: Tensor,
    e_user: Tensor | None = None,
    w_user: Tensor | None = None,
    addend: Tensor | None = None,
    bias: Tensor | None = None,
    act: str = "none",
) -> Tensor:
    """`act(w_cand @ e_cand + (w_user @ e_user + addend)[index] + bias[:, None])`, in the inputs' dtype.

    Args:
        e_cand: `[B, Kc, N]`.
        w_cand: `[M, Kc]`.
        index: `[B]`, values in `[0, U)`.
        e_user: `[U, Ku, N]` or None.
        w_user: `[M, Ku]` or None.
        addend: `[U, M, N]` or None.
        bias: `[M]` or None.
        act: Name of the activation.

    Returns:
        `[B, M, N]`.
    """
    out = w_cand @ e_cand
    if e_user is not None and w_user is not None:
        out = out + (w_user @ e_user)[index]
    if addend is not None:
        out = out + addend[index]
    return apply_activation(out if bias is None else out + bias[:, None], act)
