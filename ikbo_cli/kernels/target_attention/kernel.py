"""Attention where all candidates of a user form one block of queries: README.md derives the tiling."""

import triton
import triton.language as tl


@triton.jit
def _first_tile(offsets, users, S, BLOCK_M: tl.constexpr):
    """First query tile of users: `floor(offset * S / BLOCK_M) + user` leaves room for every user's rows."""
    return (offsets.to(tl.int64) * S // BLOCK_M).to(tl.int32) + users


@triton.jit
def _user_of_tile(offsets_ptr, tile, U, S, BLOCK_M: tl.constexpr, SCAN: tl.constexpr):
    """The user whose tiles contain `tile`; `U` stands for the candidates without a valid user."""
    base = 0
    if U >= SCAN:
        count = 0
        for start in range(0, U + 1, SCAN * SCAN):
            users = start + tl.arange(0, SCAN) * SCAN
            offsets = tl.load(offsets_ptr + users, mask=users <= U, other=0)
            before = (_first_tile(offsets, users, S, BLOCK_M) <= tile) & (users <= U)
            count += tl.sum(before.to(tl.int32), 0)
        base = (count - 1) * SCAN
    users = base + tl.arange(0, SCAN)
    offsets = tl.load(offsets_ptr + users, mask=users <= U, other=0)
    before = (_first_tile(offsets, users, S, BLOCK_M) <= tile) & (users <= U)
    return base + tl.sum(before.to(tl.int32), 0) - 1


@triton.jit
def _key_rows(
    base,
    start,
    end,
    stride_l,
    stride_d,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Rows `[BLOCK_N, BLOCK_D]` of keys or values through pointers; zeros at and after `end` when `TAIL`."""
    near = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    # 64-bit arithmetic on the scalar only: offsets within a tile fit 32 bits
    at = base + tl.full([], start, tl.int64) * stride_l
    tile = at + (near[:, None] * stride_l + columns[None, :] * stride_d)
    if TAIL:
        return tl.load(tile, mask=(start + near < end)[:, None] & (columns < D)[None, :], other=0.0)
    elif D < BLOCK_D:
        return tl.load(tile, mask=(columns < D)[None, :], other=0.0)
    else:
        return tl.load(tile)


@triton.jit
def _step(
    q,
    k_ptr,
    v_ptr,
    mask_ptr,
    acc,
    top,
    total,
    start,
    end,
    first_row,
    k_column,
    v_column,
    k_stride_l,
    k_stride_d,
    v_stride_l,
    v_stride_d,
    mask_stride_l,
    scale_log2,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """One block of keys: scores, running maximum and sum, weighted values."""
    near = tl.arange(0, BLOCK_N)
    keys = start + near
    if TMA:
        k = k_ptr.load([first_row + start, k_column])
    else:
        k = _key_rows(k_ptr, start, end, k_stride_l, k_stride_d, D, BLOCK_D, BLOCK_N, TAIL)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    scale = scale_log2
    if MASK == 1:
        kept = tl.load(mask_ptr + keys.to(tl.int64) * mask_stride_l, mask=keys < end, other=0)
        scores = tl.where((kept != 0)[None, :], scores, float("-inf"))
    elif MASK == 2:
        bias = tl.load(mask_ptr + keys.to(tl.int64) * mask_stride_l, mask=keys < end, other=float("-inf"))
        scores = scores * scale_log2 + bias.to(tl.float32)[None, :] * 1.4426950408889634
        scale = 1.0
    elif TAIL:
        scores = tl.where((keys < end)[None, :], scores, float("-inf"))
    # the scale is positive (the operator sees to it), so it commutes with the maximum
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    # a row that has met no key yet keeps weight 0 instead of exp2(-inf + inf)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top) if MASK != 0 else new_top
    weights = tl.exp2(scores * scale - shift[:, None])
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(weights, 1)
    if TMA:
        v = v_ptr.load([first_row + start, v_column])
        if TAIL:
            v = tl.where((keys < end)[:, None], v, 0.0)  # the next user's rows: 0 times NaN would spread
    else:
        v = _key_rows(v_ptr, start, end, v_stride_l, v_stride_d, D, BLOCK_D, BLOCK_N, TAIL)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return acc, new_top, total


@triton.jit
def _find_tile(order_ptr, offsets_ptr, tile, B, U, S, BLOCK_M: tl.constexpr, SCAN: tl.constexpr):
    """User of a tile, its first row within the user's rows, how many rows the user has, and its candidates.

    The candidates `[BLOCK_M]` come as loaded, so that a program that asks ahead of need does not wait for them.
    """
    user = _user_of_tile(offsets_ptr, tile, U, S, BLOCK_M, SCAN)
    first = tl.load(offsets_ptr + user)
    last = tl.load(offsets_ptr + user + 1, mask=user < U, other=B)
    row0 = (tile - _first_tile(first, user, S, BLOCK_M)) * BLOCK_M
    count = (last - first) * S
    rows = row0 + tl.arange(0, BLOCK_M)
    candidates = tl.load(order_ptr + first + rows // S, mask=rows < count, other=0)
    return user, row0, count, candidates


@triton.jit
def _queries(
    q_ptr,
    candidates,
    row0,
    count,
    head,
    S,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    q_stride_d,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Query rows `[BLOCK_M, BLOCK_D]` of a tile."""
    rows = row0 + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    at = candidates.to(tl.int64) * q_stride_b + rows % S * q_stride_s + head * q_stride_h
    inside = (rows < count)[:, None] & (columns < D)[None, :]
    return tl.load(q_ptr + at[:, None] + columns[None, :] * q_stride_d, mask=inside, other=0.0)


@triton.jit
def _attend_tile(
    q,
    k_ptr,
    v_ptr,
    mask_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    user,
    row0,
    count,
    candidates,
    head,
    part,
    B,
    U,
    L,
    S,
    H,
    span,
    k_stride_u,
    k_stride_l,
    k_stride_h,
    k_stride_d,
    v_stride_u,
    v_stride_l,
    v_stride_h,
    v_stride_d,
    mask_stride_u,
    mask_stride_l,
    scale_log2,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    MASK: tl.constexpr,
    NAN_IF_EMPTY: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """Queries of a tile against one part of their user's keys, and the store."""
    end = L
    if HAS_LENGTHS:
        end = tl.minimum(L, tl.load(lengths_ptr + user, mask=user < U, other=0).to(tl.int32))
    start = part * span
    end = tl.where((user < U) & (row0 < count), tl.minimum(end, start + span), start)
    wide_user = user.to(tl.int64)
    if not TMA:
        k_ptr += wide_user * k_stride_u + head * k_stride_h
        v_ptr += wide_user * v_stride_u + head * v_stride_h
    if MASK != 0:
        mask_ptr += wide_user * mask_stride_u

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    whole = start + tl.maximum(end - start, 0) // BLOCK_N * BLOCK_N
    for at in range(start, whole, BLOCK_N):
        acc, top, total = _step(
            q, k_ptr, v_ptr, mask_ptr, acc, top, total, at, end, user * L, head * k_stride_h, head * v_stride_h,
            k_stride_l, k_stride_d, v_stride_l, v_stride_d, mask_stride_l, scale_log2,
            D, BLOCK_D, BLOCK_N, False, MASK, PRECISION, TMA,
        )  # fmt: skip
    if whole < end:
        acc, top, total = _step(
            q, k_ptr, v_ptr, mask_ptr, acc, top, total, whole, end, user * L, head * k_stride_h, head * v_stride_h,
            k_stride_l, k_stride_d, v_stride_l, v_stride_d, mask_stride_l, scale_log2,
            D, BLOCK_D, BLOCK_N, True, MASK, PRECISION, TMA,
        )  # fmt: skip

    columns = tl.arange(0, BLOCK_D)
    rows = row0 + tl.arange(0, BLOCK_M)
    is_row = rows < count
    slot = (part.to(tl.int64) * B + candidates) * S + rows % S
    slot = slot * H + head  # row of [parts, B, S, H]
    empty = top == float("-inf")
    divisor = tl.where(empty, 1.0, total)
    result = acc * (1.0 / divisor)[:, None]
    lse = top + tl.log2(divisor)
    bad = (top != top) | (user == U)  # candidates without a valid user
    if NAN_IF_EMPTY and not SPLIT:
        bad |= empty
    lse = tl.where(bad, float("nan"), lse)
    result = tl.where(bad[:, None], float("nan"), result)
    if SPLIT:
        tl.store(lse_ptr + slot, lse, mask=is_row)
    stored = is_row[:, None] & (columns < D)[None, :]
    tl.store(out_ptr + slot[:, None] * D + columns[None, :], result.to(out_ptr.dtype.element_ty), mask=stored)


# sizes that change from request to request must not compile a kernel anew: `do_not_specialize`
@triton.jit(do_not_specialize=["B", "U", "L", "S", "H", "span", "tiles", "parts"])
def target_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    lengths_ptr,
    order_ptr,
    offsets_ptr,
    out_ptr,
    lse_ptr,
    B,
    U,
    L,
    S,
    H,
    span,
    tiles,
    parts,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    q_stride_d,
    k_stride_u,
    k_stride_l,
    k_stride_h,
    k_stride_d,
    v_stride_u,
    v_stride_l,
    v_stride_h,
    v_stride_d,
    mask_stride_u,
    mask_stride_l,
    scale_log2,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    MASK: tl.constexpr,
    NAN_IF_EMPTY: tl.constexpr,
    PRECISION: tl.constexpr,
    SCAN: tl.constexpr,
    TMA: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    """Work item (part, head, tile): `BLOCK_M` query rows of a user against keys `[part * span, + span)`.

    Writes rows of `out [B, S, H, D]`; with `SPLIT`, normalized float32 partial rows of
    `out [parts, B, S, H, D]` and their base-2 log sums `lse [parts, B, S, H]` instead. With `TMA`, `k_ptr` and
    `v_ptr` are descriptors of matrices `[U * L, stride_l]` whose heads are `stride_h` columns apart. With
    `PERSISTENT` a program takes every n-th item; while it works on one it loads the next one's queries and finds
    the candidates of the one after.
    """
    work = tl.program_id(0)
    user, row0, count, candidates = _find_tile(order_ptr, offsets_ptr, work % tiles, B, U, S, BLOCK_M, SCAN)
    q = _queries(
        q_ptr, candidates, row0, count, work // tiles % H, S,
        q_stride_b, q_stride_s, q_stride_h, q_stride_d, D, BLOCK_D, BLOCK_M,
    )  # fmt: skip
    if PERSISTENT:
        items = tiles * H * parts
        stride = tl.num_programs(0)
        # items beyond the end repeat the last one: loaded, never used
        ahead = tl.minimum(work + stride, items - 1)
        next_user, next_row0, next_count, next_candidates = _find_tile(
            order_ptr, offsets_ptr, ahead % tiles, B, U, S, BLOCK_M, SCAN
        )
        for item in tl.range(work, items, stride, num_stages=1):
            ahead = tl.minimum(item + stride, items - 1)
            next_q = _queries(
                q_ptr, next_candidates, next_row0, next_count, ahead // tiles % H, S,
                q_stride_b, q_stride_s, q_stride_h, q_stride_d, D, BLOCK_D, BLOCK_M,
            )  # fmt: skip
            far = tl.minimum(item + 2 * stride, items - 1)
            far_user, far_row0, far_count, far_candidates = _find_tile(
                order_ptr, offsets_ptr, far % tiles, B, U, S, BLOCK_M, SCAN
            )
            _attend_tile(
                q, k_ptr, v_ptr, mask_ptr, lengths_ptr, out_ptr, lse_ptr, user, row0, count, candidates,
                item // tiles % H, item // tiles // H, B, U, L, S, H, span,
                k_stride_u, k_stride_l, k_stride_h, k_stride_d, v_stride_u, v_stride_l, v_stride_h, v_stride_d,
                mask_stride_u, mask_stride_l, scale_log2,
                D, BLOCK_D, BLOCK_M, BLOCK_N, SPLIT, HAS_LENGTHS, MASK, NAN_IF_EMPTY, PRECISION, TMA,
            )  # fmt: skip
            q, user, row0, count, candidates = next_q, next_user, next_row0, next_count, next_candidates
            next_user, next_row0, next_count, next_candidates = far_user, far_row0, far_count, far_candidates
    else:
        _attend_tile(
            q, k_ptr, v_ptr, mask_ptr, lengths_ptr, out_ptr, lse_ptr, user, row0, count, candidates,
            work // tiles % H, work // tiles // H, B, U, L, S, H, span,
            k_stride_u, k_stride_l, k_stride_h, k_stride_d, v_stride_u, v_stride_l, v_stride_h, v_stride_d,
            mask_stride_u, mask_stride_l, scale_log2,
            D, BLOCK_D, BLOCK_M, BLOCK_N, SPLIT, HAS_LENGTHS, MASK, NAN_IF_EMPTY, PRECISION, TMA,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "parts"])
def target_attention_combine_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,
    rows,
    parts,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    NAN_IF_EMPTY: tl.constexpr,
):
    """Rows of `out [rows, D]` from partial rows `[parts, rows, D]`, always in the order of the parts."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    part = tl.arange(0, BLOCK_P)
    is_row = row < rows
    wide_rows = rows.to(tl.int64)
    at = part[:, None] * wide_rows + row[None, :]
    lse = tl.load(lse_ptr + at, mask=(part < parts)[:, None] & is_row[None, :], other=float("-inf"))
    top = tl.max(lse, 0)  # NaN rows (no such user) are NaN in every part: the weights below are NaN too
    empty = top == float("-inf")
    shift = tl.where(empty, 0.0, top)
    total = tl.sum(tl.exp2(lse - shift[None, :]), 0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    inside = is_row[:, None] & (columns < D)[None, :]
    for p in range(0, parts):
        own = p * wide_rows + row
        weight = tl.exp2(tl.load(lse_ptr + own, mask=is_row, other=0.0) - shift)
        partial = tl.load(part_ptr + own[:, None] * D + columns[None, :], mask=inside, other=0.0)
        acc += partial * weight[:, None]
    result = acc / tl.where(empty, 1.0, total)[:, None]
    if NAN_IF_EMPTY:
        result = tl.where(empty[:, None], float("nan"), result)
    tl.store(out_ptr + row[:, None] * D + columns[None, :], result.to(out_ptr.dtype.element_ty), mask=inside)
