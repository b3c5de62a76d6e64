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


# sizes that change from request to request must not compile a kernel anew: `do_not_specialize`
@triton.jit(do_not_specialize=["B", "U", "L", "S", "H", "span"])
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
):
    """Program (tile, head, part): `BLOCK_M` query rows of one user against keys `[part * span, + span)`.

    Writes rows of `out [B, S, H, D]`; with `SPLIT`, normalized float32 partial rows of
    `out [parts, B, S, H, D]` and their base-2 log sums `lse [parts, B, S, H]` instead. With `TMA`, `k_ptr` and
    `v_ptr` are descriptors of matrices `[U * L, stride_l]` whose heads are `stride_h` columns apart.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    scale_log2 = tl.full([], scale_log2, tl.float32)  # a compiler may pass it as float64
    user = _user_of_tile(offsets_ptr, tile, U, S, BLOCK_M, SCAN)
    first = tl.load(offsets_ptr + user)
    last = tl.load(offsets_ptr + user + 1, mask=user < U, other=B)
    row0 = (tile - _first_tile(first, user, S, BLOCK_M)) * BLOCK_M
    rows_of_user = (last - first) * S
    if row0 >= rows_of_user:
        return

    rows = row0 + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    is_row = rows < rows_of_user
    candidate = tl.load(order_ptr + first + rows // S, mask=is_row, other=0).to(tl.int64)
    step = rows % S
    slot = (candidate * S + step) * H + head  # row of [B, S, H]
    stored = is_row[:, None] & (columns < D)[None, :]
    part_rows = part.to(tl.int64) * B * S * H
    out_tile = out_ptr + (part_rows + slot)[:, None] * D + columns[None, :]
    if user == U:
        tl.store(out_tile, tl.full([BLOCK_M, BLOCK_D], float("nan"), out_ptr.dtype.element_ty), mask=stored)
        if SPLIT:
            tl.store(lse_ptr + part_rows + slot, tl.full([BLOCK_M], float("nan"), tl.float32), mask=is_row)
        return

    q_tile = q_ptr + (candidate * q_stride_b + step * q_stride_s + head * q_stride_h)[:, None]
    q = tl.load(q_tile + columns[None, :] * q_stride_d, mask=stored, other=0.0)

    end = L
    if HAS_LENGTHS:
        end = tl.minimum(L, tl.load(lengths_ptr + user).to(tl.int32))
    start = part * span
    end = tl.minimum(end, start + span)
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

    empty = top == float("-inf")
    divisor = tl.where(empty, 1.0, total)
    result = acc * (1.0 / divisor)[:, None]
    if SPLIT:
        tl.store(lse_ptr + part_rows + slot, top + tl.log2(divisor), mask=is_row)
    elif NAN_IF_EMPTY:
        result = tl.where(empty[:, None], float("nan"), result)
    tl.store(out_tile, result.to(out_ptr.dtype.element_ty), mask=stored)


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
