"""Activations that a kernel's epilogue can apply, by name and by the code that Triton compiles in."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ikbo_cli.errors import ShapeError

ACTIVATIONS = ("none", "relu", "sigmoid", "tanh", "silu", "gelu")
"""Names in the order of their codes; `gelu` is the exact (erf) form."""


def activation_code(act: str) -> int:
    """Code of an activation, as the kernels' `ACT` constant.

    Raises:
        ShapeError: The name is unknown.
    """
    if act not in ACTIVATIONS:
        raise ShapeError(f"unknown activation {act!r}", hint=f"one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS.index(act)


def apply_activation(x: Tensor, act: str) -> Tensor:
    """Activation of `x` (any shape, any float dtype), in that dtype."""
    match act:
        case "relu":
            return torch.relu(x)
        case "sigmoid":
            return torch.sigmoid(x)
        case "tanh":
            return torch.tanh(x)
        case "silu":
            return functional.silu(x)
        case "gelu":
            return functional.gelu(x)
        case _:
            return x
