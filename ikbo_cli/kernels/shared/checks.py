"""Argument checks: every message names the tensors and both shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ikbo_cli.errors import ShapeError

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


def text(tensor: Tensor) -> str:
    """Shape and dtype of a tensor, e.g. `[4, 8] bfloat16`."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def same_size(op: str, a: tuple[str, Tensor, int], b: tuple[str, Tensor, int]) -> None:
    """Require that dimension `a[2]` of `a[1]` equals dimension `b[2]` of `b[1]`.

    Raises:
        ShapeError: They differ; both shapes are named.
    """
    if a[1].shape[a[2]] != b[1].shape[b[2]]:
        raise ShapeError(
            f"{op}: {a[0]} {text(a[1])} and {b[0]} {text(b[1])} differ: "
            f"dimension {a[2]} of {a[0]} must equal dimension {b[2]} of {b[0]}"
        )


def has_rank(op: str, name: str, tensor: Tensor, rank: int, at_least: bool = False) -> None:
    """Require `rank` dimensions (or more, with `at_least`)."""
    if tensor.ndim != rank and not (at_least and tensor.ndim > rank):
        more = " or more" if at_least else ""
        raise ShapeError(f"{op}: {name} {text(tensor)} must have {rank}{more} dimensions")


def has_dtype(op: str, name: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Require one of the dtypes."""
    if tensor.dtype not in dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ShapeError(f"{op}: {name} {text(tensor)} must be {names}")


def one_device(op: str, tensors: Sequence[Tensor | None]) -> None:
    """Require that all tensors given live on one device."""
    devices = {t.device for t in tensors if t is not None}
    if len(devices) > 1:
        raise ShapeError(f"{op}: tensors on several devices: {', '.join(sorted(map(str, devices)))}")


def check_index(op: str, index: Tensor, rows: tuple[str, Tensor]) -> None:
    """Require an int32 or int64 vector with one entry per row of a candidate tensor."""
    has_rank(op, "index", index, 1)
    has_dtype(op, "index", index, INTEGERS)
    same_size(op, ("index", index, 0), (rows[0], rows[1], 0))
