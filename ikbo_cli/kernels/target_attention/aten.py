"""Target attention as a composition of aten operators: every device, differentiable, no loop over users.

Three layouts. *Blocks* of `T = ceil(B / U)` candidates of one user each need at most `B // T + U` blocks, a
bound from sizes alone; keys and values are gathered per block, not per candidate. *Padded* to the largest
user needs no gather of keys at all, but a host read, so it serves eager CPU calls only. *Gathered* keys per
candidate are best where users have hardly more than one candidate.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ikbo_cli.kernels.shared.rows import gather_rows, is_eager, size_hint


def target_attention_aten(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    order: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    mask: Tensor | None,
    scale: float,
    nan_if_empty: bool,
) -> Tensor:
    """Arguments and result as `broadcast_target_attention`; `order` and `offsets` from `group_candidates`."""
    users, keys = k.shape[:2]
    if isinstance(users, int) and users == 0:
        return q.new_full(q.shape, float("nan"))
    bias, empty = _key_bias(k, lengths, mask, q.dtype)
    if empty is None and nan_if_empty:
        empty = k.new_zeros(users, dtype=torch.bool) | (keys == 0)
    if lengths is not None:
        # a masked weight of 0 times NaN in the padding would still be NaN
        beyond = (torch.arange(keys, device=k.device) >= lengths[:, None])[:, :, None, None]
        k, v = k.masked_fill(beyond, 0.0), v.masked_fill(beyond, 0.0)
    index = index.long()
    outside = (index < 0) | (index >= users)
    user = index.clamp(0, users - 1)
    candidates = q.shape[0]
    if size_hint(candidates) < 2 * size_hint(users) and not _pads_well(q, users, offsets):
        out = _attend(q, gather_rows(k, user), gather_rows(v, user), _rows(bias, user), scale)
    else:
        out = _grouped(q, k, v, user, order, offsets, bias, scale)
    if empty is not None:
        fill = float("nan") if nan_if_empty else 0.0
        out = out.masked_fill(empty.index_select(0, user)[:, None, None, None], fill)
    return out.masked_fill(outside[:, None, None, None], float("nan")) if q.is_cuda else out


def _key_bias(
    k: Tensor, lengths: Tensor | None, mask: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Mask of the keys `[U, L]` (bool or additive) and the users that keep none (it lets theirs through)."""
    keys = k.shape[1]
    kept = None
    if lengths is not None:
        kept = torch.arange(keys, device=k.device) < lengths[:, None]
    if mask is not None:
        unmasked = mask if mask.dtype == torch.bool else mask != float("-inf")
        kept = unmasked if kept is None else kept & unmasked
    if kept is None:
        return None, None
    empty = ~kept.any(1)
    kept = kept | empty[:, None]  # a softmax over nothing has a NaN gradient
    if mask is None or mask.dtype == torch.bool:
        return kept, empty
    additive = mask.to(dtype).masked_fill(empty[:, None], 0.0)
    return additive.masked_fill(~kept, float("-inf")), empty


def _rows(table: Tensor | None, index: Tensor) -> Tensor | None:
    return None if table is None else gather_rows(table, index)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """`[G, R, H, D]` against `[G, L, H, D]`, mask `[G, L]`."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    full = None if bias is None else bias[:, None, None, :].expand(q.shape[0], 1, q.shape[2], k.shape[2])
    if q.is_cuda and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        # the fused backward passes add with float atomics
        with sdpa_kernel(SDPBackend.MATH):
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=full, scale=scale)
        return out.transpose(1, 2)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=full, scale=scale).transpose(1, 2)


def _largest_user(offsets: Tensor) -> int:
    return int((offsets[1:] - offsets[:-1]).max())


def _pads_well(q: Tensor, users: int, offsets: Tensor) -> bool:
    """Whether padding every user to the largest at most doubles the rows (known in eager CPU calls only)."""
    if q.is_cuda or not is_eager(offsets) or q.shape[0] == 0:
        return False
    return _largest_user(offsets) * users <= 2 * q.shape[0]


def _grouped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    user: Tensor,
    order: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    scale: float,
) -> Tensor:
    candidates, steps, heads, width = q.shape
    users = k.shape[0]
    position = torch.empty_like(order, dtype=torch.int64)
    position = position.index_copy(0, order.long(), torch.arange(candidates, device=q.device))
    first = offsets.long()
    rank = position - first.index_select(0, user)  # place of a candidate within its user
    if _pads_well(q, users, offsets):
        rows, blocks = _largest_user(offsets), users
        block = user
        k_block, v_block, bias_block = k, v, bias
    else:
        rows = torch.sym_max(1, (candidates + users - 1) // users)  # type: ignore[no-untyped-call]
        blocks = candidates // rows + users
        block = first.index_select(0, user) // rows + user + rank // rows
        user_of_block = user.new_zeros(blocks).index_put((block,), user)
        k_block, v_block = gather_rows(k, user_of_block), gather_rows(v, user_of_block)
        bias_block = _rows(bias, user_of_block)
    slot = block * rows + rank % rows
    q_block = q.new_zeros(blocks * rows, steps, heads, width).index_copy(0, slot, q)
    out = _attend(q_block.reshape(blocks, rows * steps, heads, width), k_block, v_block, bias_block, scale).reshape(
        blocks * rows, steps, heads, width
    )
    return out.index_select(0, slot)
