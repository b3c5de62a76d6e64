"""`ikbo::group`: the permutation that brings each user's candidates together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from ikbo_cli.errors import ShapeError
from ikbo_cli.kernels.group.configs import MERGE, MERGE_LIMIT, RANK, RANK_LIMIT, GroupConfig
from ikbo_cli.kernels.shared.checks import INTEGERS, has_dtype, has_rank
from ikbo_cli.kernels.shared.device import cdiv
from ikbo_cli.kernels.shared.rows import is_eager, size_hint


def group_candidates(index: Tensor, users: int) -> tuple[Tensor, Tensor]:
    """Group candidates by user, stable and without a host read on a GPU.

    Compute it once a request and pass it to every operator that asks for `order` and `offsets`.

    Args:
        index: `[B]`, int32 or int64, user of each candidate, any order.
        users: `U`, number of user rows; 0 and more than `B` are legal.

    Returns:
        order: `[B]`, int32. Candidates of user 0 in batch order, then of user 1, ...; those whose user is out
            of range last.
        offsets: `[U + 1]`, int32. User `u` owns `order[offsets[u]:offsets[u + 1]]`.

    Raises:
        ShapeError: `index` is no integer vector, or `users` is negative.
        IndexError: An index is out of range (CPU only; on a GPU those candidates come last).
    """
    order, offsets = torch.ops.ikbo.group(index, users)
    return order, offsets


def _check(index: Tensor, users: int) -> None:
    has_rank("group", "index", index, 1)
    has_dtype("group", "index", index, INTEGERS)
    if users < 0:
        raise ShapeError(f"group: users is {users}, it cannot be negative")


@triton_op("ikbo::group", mutates_args={})
def _group(index: Tensor, users: int) -> tuple[Tensor, Tensor]:
    _check(index, users)
    if not index.is_cuda or size_hint(index.shape[0]) > MERGE_LIMIT:
        return group_aten(index, users)
    return launch_group(index, users, wrap=wrap_triton)


def _fake(index: Tensor, users: int) -> tuple[Tensor, Tensor]:
    _check(index, users)
    return index.new_empty(index.shape[0], dtype=torch.int32), index.new_empty(users + 1, dtype=torch.int32)


_group.register_fake(_fake)


def group_aten(index: Tensor, users: int) -> tuple[Tensor, Tensor]:
    """The same from a library sort: any device, no data-dependent shape."""
    keys = index.long()
    if is_eager(index) and not index.is_cuda and bool(((keys < 0) | (keys >= users)).any()):
        raise IndexError(f"index out of range: values must lie in [0, {users})")
    keys = torch.where((keys < 0) | (keys >= users), users, keys)
    ordered, order = torch.sort(keys, stable=True)
    offsets = torch.searchsorted(ordered, torch.arange(users + 1, device=index.device), out_int32=True)
    return order.int(), offsets


def ranks_fit(rows: int, users: int) -> bool:
    """Whether the one-launch form serves `rows` candidates of `users`: quickly, and in 32-bit numbers."""
    return max(rows, users) <= RANK_LIMIT and (users + 3) * (rows + RANK.chunk) < 2**31


def launch_group(
    index: Tensor,
    users: int,
    *,
    config: GroupConfig | None = None,
    two_launches: bool | None = None,
    wrap: Callable[[Any], Any] = lambda kernel: kernel,
) -> tuple[Tensor, Tensor]:
    """Launch the Triton form: one launch for few candidates, two above.

    Args:
        index: `[B]`, int32 or int64.
        users: `U`.
        config: Sizes; the shipped ones when None.
        two_launches: Forces one of the forms; by size when None.
        wrap: `torch.library.wrap_triton` inside an operator.
    """
    from ikbo_cli.kernels.group import kernel

    rows = index.shape[0]
    order = index.new_empty(rows, dtype=torch.int32)
    offsets = index.new_empty(users + 1, dtype=torch.int32)
    if two_launches is None:
        # where a size is symbolic, only the form that is right for every size will do
        symbolic = not (isinstance(rows, int) and isinstance(users, int))
        two_launches = symbolic or not ranks_fit(rows, users)
    if not two_launches:
        config = config or RANK
        grid = (cdiv(rows, config.block) + cdiv(users + 1, config.block),)
        wrap(kernel.group_rank_kernel)[grid](
            index, order, offsets, index.stride(0), rows, users,
            BLOCK=config.block, CHUNK=config.chunk, num_warps=config.num_warps,
        )  # fmt: skip
        return order, offsets
    config = config or MERGE
    chunks = cdiv(rows, config.chunk)
    keys = index.new_empty(chunks * config.chunk, dtype=torch.int32)
    sorted_rows = torch.empty_like(keys)
    sort_programs = chunks * (config.chunk // config.block)
    wrap(kernel.group_chunk_sort_kernel)[(sort_programs,)](
        index, keys, sorted_rows, index.stride(0), rows, users,
        BLOCK=config.block, CHUNK=config.chunk, num_warps=config.num_warps,
    )  # fmt: skip
    wrap(kernel.group_merge_kernel)[(sort_programs + cdiv(users + 1, config.block),)](
        keys, sorted_rows, order, offsets, rows, users, chunks,
        BLOCK=config.block, CHUNK=config.chunk, STEPS=config.chunk.bit_length() - 1, WIDTH=config.width,
        num_warps=config.num_warps,
    )  # fmt: skip
    return order, offsets
