"""Pairwise dot products of fields; the user-user block has `U` rows, never `B`."""

import triton
import triton.language as tl


@triton.jit
def _field_rows(
    user_ptr,
    cand_ptr,
    field,
    columns,
    user_stride_f,
    user_stride_d,
    cand_stride_f,
    cand_stride_d,
    known,
    D,
    FU: tl.constexpr,
    FC: tl.constexpr,
):
    """Fields of a pair as one matrix: `FU` user rows, then `FC` candidate rows, then zeros."""
    in_depth = (columns < D)[None, :]
    from_user = (field < FU)[:, None] & in_depth
    user_at = user_ptr + (field[:, None] * user_stride_f + columns[None, :] * user_stride_d)
    rows = tl.load(user_at, mask=from_user & known, other=0.0)
    from_cand = (field >= FU)[:, None] & (field < FU + FC)[:, None] & in_depth
    cand_at = cand_ptr + ((field[:, None] - FU) * cand_stride_f + columns[None, :] * cand_stride_d)
    return tl.where(from_cand, tl.load(cand_at, mask=from_cand, other=0.0), rows)


# sizes that change from request to request must not compile a kernel anew
@triton.jit(do_not_specialize=["B", "U", "D", "dense_columns"])
def dot_interaction_kernel(
    user_ptr,
    cand_ptr,
    dense_ptr,
    index_ptr,
    uu_ptr,
    mixed_ptr,
    B,
    U,
    D,
    dense_columns,
    width,
    user_stride_u,
    user_stride_f,
    user_stride_d,
    cand_stride_b,
    cand_stride_f,
    cand_stride_d,
    dense_stride_b,
    dense_stride_n,
    index_stride,
    FU: tl.constexpr,
    FC: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Programs `0..B-1`: a row of `mixed [B, width]`; the others: a row of `uu [U, FU (FU - 1) / 2]`.

    `mixed` holds user-candidate products row-major, the candidate-candidate upper triangle, the dense columns
    and zeros up to `width`. An unknown user's products are NaN.
    """
    program = tl.program_id(0).to(tl.int64)
    depth = tl.arange(0, BLOCK_D)
    if program < B:
        user = tl.load(index_ptr + program * index_stride).to(tl.int64)
        known = (user >= 0) & (user < U)
        user_ptr += tl.where(known, user, 0) * user_stride_u
        cand_ptr += program * cand_stride_b
        field = tl.arange(0, BLOCK_F)
        other = tl.arange(0, BLOCK_C)
        products = tl.zeros([BLOCK_F, BLOCK_C], tl.float32)
        for start in range(0, D, BLOCK_D):
            columns = start + depth
            rows = _field_rows(
                user_ptr, cand_ptr, field, columns, user_stride_f, user_stride_d,
                cand_stride_f, cand_stride_d, known, D, FU, FC,
            )  # fmt: skip
            at = cand_ptr + (other[:, None] * cand_stride_f + columns[None, :] * cand_stride_d)
            cand = tl.load(at, mask=(other < FC)[:, None] & (columns < D)[None, :], other=0.0)
            products = tl.dot(rows, tl.trans(cand), products, input_precision=PRECISION)
        first = field[:, None]
        second = other[None, :]
        from_user = first < FU
        products = tl.where(from_user & (not known), float("nan"), products)
        row = first - FU
        triangle = FU * FC + row * (2 * FC - row - 1) // 2 + second - row - 1
        at = tl.where(from_user, first * FC + second, triangle)
        kept = (second < FC) & (from_user | ((first < FU + FC) & (row < second)))
        mixed_ptr += program * width
        tl.store(mixed_ptr + at, products.to(mixed_ptr.dtype.element_ty), mask=kept)
        done = FU * FC + FC * (FC - 1) // 2
        for start in range(0, width - done, BLOCK_T):
            column = start + tl.arange(0, BLOCK_T)
            dense_at = dense_ptr + program * dense_stride_b + column * dense_stride_n
            tail = tl.load(dense_at, mask=column < dense_columns, other=0.0)
            tail = tail.to(mixed_ptr.dtype.element_ty)
            tl.store(mixed_ptr + done + column, tail, mask=done + column < width)
    else:
        own = program - B
        user_ptr += own * user_stride_u
        line = tl.arange(0, BLOCK_U)
        square = tl.zeros([BLOCK_U, BLOCK_U], tl.float32)
        for start in range(0, D, BLOCK_D):
            columns = start + depth
            user_at = user_ptr + (line[:, None] * user_stride_f + columns[None, :] * user_stride_d)
            fields = tl.load(user_at, mask=(line < FU)[:, None] & (columns < D)[None, :], other=0.0)
            square = tl.dot(fields, tl.trans(fields), square, input_precision=PRECISION)
        upper = line[:, None]
        right = line[None, :]
        place = upper * (2 * FU - upper - 1) // 2 + right - upper - 1
        uu_ptr += own * (FU * (FU - 1) // 2)
        tl.store(uu_ptr + place, square.to(uu_ptr.dtype.element_ty), mask=(upper < right) & (right < FU))
