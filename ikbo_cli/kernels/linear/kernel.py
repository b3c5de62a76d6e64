"""Candidate GEMM with the user addend gathered in its epilogue."""

import triton
import triton.language as tl

from ikbo_cli.kernels.shared.kernel import activate


@triton.jit
def _store_columns(
    acc,
    row,
    column,
    addend_ptr,
    bias_ptr,
    index_ptr,
    out_ptr,
    rows,
    U,
    T,
    N,
    addend_stride_u,
    addend_stride_t,
    addend_stride_n,
    bias_stride,
    index_stride,
    ACT: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Addend, bias, activation and the only rounding, for some columns of a tile."""
    is_row = row < rows
    inside = is_row[:, None] & (column < N)[None, :]
    if HAS_ADDEND:
        user = tl.load(index_ptr + row // T * index_stride, mask=is_row, other=0).to(tl.int64)
        known = (user >= 0) & (user < U)
        at = (user * addend_stride_u + row % T * addend_stride_t)[:, None] + column[None, :] * addend_stride_n
        acc += tl.load(addend_ptr + at, mask=inside & known[:, None], other=float("nan"))
    if HAS_BIAS:
        acc += tl.load(bias_ptr + column * bias_stride, mask=column < N, other=0.0).to(tl.float32)[None, :]
    acc = activate(acc, ACT)
    tl.store(out_ptr + (row[:, None] * N + column[None, :]), acc.to(out_ptr.dtype.element_ty), mask=inside)


# sizes that change from request to request must not compile a kernel anew
@triton.jit(do_not_specialize=["rows", "U", "n_units", "k_units", "x_units_r", "w_units"])
def broadcast_linear_kernel(
    x_ptr,
    w_ptr,
    addend_ptr,
    bias_ptr,
    index_ptr,
    out_ptr,
    rows,
    U,
    T,
    n_units,
    k_units,
    x_units_r,
    x_stride_k,
    w_units,
    w_stride,
    addend_stride_u,
    addend_stride_t,
    addend_stride_n,
    bias_stride,
    index_stride,
    N_UNIT: tl.constexpr,
    K_UNIT: tl.constexpr,
    X_UNIT: tl.constexpr,
    W_UNIT: tl.constexpr,
    W_N_CONTIGUOUS: tl.constexpr,
    EVEN_N: tl.constexpr,
    ACT: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALVES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One `[BLOCK_M, BLOCK_N]` tile of `out [B * T, N]`; tiles of one row block follow each other.

    K and the strides come in units of elements, so that the compiler knows their alignment (of `w`: the stride that
    is not 1; `w_stride` is the other). Whole blocks of K
    are read without a mask; the rest of K by one masked block that never reaches the next row. With `HALVES`
    the epilogue takes the columns in two halves: a whole addend tile beside the accumulators would spill.
    """
    N = n_units * N_UNIT
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    row0 = (tile // tiles_n).to(tl.int64) * BLOCK_M
    column0 = tile % tiles_n * BLOCK_N
    depth = tl.arange(0, BLOCK_K)
    K = k_units * K_UNIT
    # rows beyond the end repeat the last one: no mask in the loop, nothing stored
    near_row = tl.minimum(tl.arange(0, BLOCK_M), (rows - 1 - row0).to(tl.int32))
    x_tile = near_row[:, None] * (x_units_r * X_UNIT) + depth[None, :] * x_stride_k
    x_ptr += row0 * (x_units_r * X_UNIT)
    near_column = tl.arange(0, BLOCK_N)
    if W_N_CONTIGUOUS:
        w_step = w_units * W_UNIT
        w_ptr += column0
        w_tile = near_column[None, :] + depth[:, None] * w_step
    else:
        w_step = w_stride
        w_ptr += column0.to(tl.int64) * (w_units * W_UNIT)
        near_column = tl.minimum(near_column, N - 1 - column0)
        w_tile = near_column[None, :] * (w_units * W_UNIT) + depth[:, None] * w_step
    column = column0 + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(0, K // BLOCK_K):
        x = tl.load(x_ptr + x_tile)
        if W_N_CONTIGUOUS and not EVEN_N:
            w = tl.load(w_ptr + w_tile, mask=(column < N)[None, :], other=0.0)
        else:
            w = tl.load(w_ptr + w_tile)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        x_ptr += BLOCK_K * x_stride_k
        w_ptr += BLOCK_K * w_step
    rest = K % BLOCK_K
    if rest > 0:
        x = tl.load(x_ptr + x_tile, mask=(depth < rest)[None, :], other=0.0)
        w = tl.load(w_ptr + w_tile, mask=(depth < rest)[:, None] & (column < N)[None, :], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)

    row = row0 + tl.arange(0, BLOCK_M)
    if HALVES:
        left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
        half = column0 + tl.arange(0, BLOCK_N // 2)
        _store_columns(
            left, row, half, addend_ptr, bias_ptr, index_ptr, out_ptr, rows, U, T, N,
            addend_stride_u, addend_stride_t, addend_stride_n, bias_stride, index_stride,
            ACT, HAS_ADDEND, HAS_BIAS,
        )  # fmt: skip
        _store_columns(
            right, row, half + BLOCK_N // 2, addend_ptr, bias_ptr, index_ptr, out_ptr, rows, U, T, N,
            addend_stride_u, addend_stride_t, addend_stride_n, bias_stride, index_stride,
            ACT, HAS_ADDEND, HAS_BIAS,
        )  # fmt: skip
    else:
        _store_columns(
            acc, row, column, addend_ptr, bias_ptr, index_ptr, out_ptr, rows, U, T, N,
            addend_stride_u, addend_stride_t, addend_stride_n, bias_stride, index_stride,
            ACT, HAS_ADDEND, HAS_BIAS,
        )  # fmt: skip
