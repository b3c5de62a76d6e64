"""Batched `W @ E[b]` with the user addend gathered in its epilogue."""

import triton
import triton.language as tl

from ikbo_cli.kernels.shared.kernel import activate


@triton.jit
def _store_columns(
    acc,
    row,
    column,
    user,
    known,
    addend_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    addend_stride_u,
    addend_stride_m,
    addend_stride_n,
    bias_stride,
    ACT: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Addend, bias, activation and the only rounding, for some columns of a tile."""
    inside = (row < M)[:, None] & (column < N)[None, :]
    if HAS_ADDEND:
        at = row[:, None].to(tl.int64) * addend_stride_m + column[None, :] * addend_stride_n
        acc += tl.load(addend_ptr + user * addend_stride_u + at, mask=inside & known, other=float("nan"))
    if HAS_BIAS:
        acc += tl.load(bias_ptr + row * bias_stride, mask=row < M, other=0.0).to(tl.float32)[:, None]
    acc = activate(acc, ACT)
    tl.store(out_ptr + row[:, None] * N + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _product_by_descriptors(
    w_desc,
    e_desc,
    candidate,
    row0,
    column0,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Product tile through descriptors `[M, K]` and `[B, K, N]`: both end where K ends, with zeros."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    batch = candidate.to(tl.int32)
    for start in range(0, K, BLOCK_K):
        w = w_desc.load([row0, start])
        e = e_desc.load([batch, start, column0]).reshape(BLOCK_K, BLOCK_N)
        acc = tl.dot(w, e, acc)
    return acc


@triton.jit
def _product_by_pointers(
    w_ptr,
    e_ptr,
    row0,
    column0,
    M,
    N,
    K,
    w_stride_m,
    w_stride_k,
    e_stride_k,
    e_stride_n,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Product tile by pointers: whole blocks of K unmasked, the rest by one masked block."""
    depth = tl.arange(0, BLOCK_K)
    near_row = tl.minimum(tl.arange(0, BLOCK_M), M - 1 - row0)  # rows beyond M repeat the last one
    column = column0 + tl.arange(0, BLOCK_N)
    w_ptr += tl.full([], row0, tl.int64) * w_stride_m
    w_tile = near_row[:, None] * w_stride_m + depth[None, :] * w_stride_k
    e_tile = depth[:, None] * e_stride_k + column[None, :] * e_stride_n
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(0, K // BLOCK_K):
        w = tl.load(w_ptr + w_tile)
        inside = (column < N)[None, :] if not EVEN_N else None
        e = tl.load(e_ptr + e_tile, mask=inside, other=0.0 if not EVEN_N else None)
        acc = tl.dot(w, e, acc, input_precision=PRECISION)
        w_ptr += BLOCK_K * w_stride_k
        e_ptr += tl.full([], BLOCK_K, tl.int64) * e_stride_k
    rest = K % BLOCK_K
    if rest > 0:
        w = tl.load(w_ptr + w_tile, mask=(depth < rest)[None, :], other=0.0)
        e = tl.load(e_ptr + e_tile, mask=(depth < rest)[:, None] & (column < N)[None, :], other=0.0)
        acc = tl.dot(w, e, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _lce_tile(
    w_ptr,
    e_ptr,
    addend_ptr,
    bias_ptr,
    out_ptr,
    candidate,
    row0,
    column0,
    user,
    known,
    M,
    N,
    K,
    w_stride_m,
    w_stride_k,
    e_stride_b,
    e_stride_k,
    e_stride_n,
    addend_stride_u,
    addend_stride_m,
    addend_stride_n,
    bias_stride,
    EVEN_N: tl.constexpr,
    ACT: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALVES: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """One `[BLOCK_M, BLOCK_N]` tile."""
    if TMA:
        acc = _product_by_descriptors(w_ptr, e_ptr, candidate, row0, column0, K, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        acc = _product_by_pointers(
            w_ptr, e_ptr + candidate * e_stride_b, row0, column0, M, N, K,
            w_stride_m, w_stride_k, e_stride_k, e_stride_n, EVEN_N, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
        )  # fmt: skip
    row = row0 + tl.arange(0, BLOCK_M)
    column = column0 + tl.arange(0, BLOCK_N)
    if HALVES:
        left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
        half = column0 + tl.arange(0, BLOCK_N // 2)
        _store_columns(
            left, row, half, user, known, addend_ptr, bias_ptr, out_ptr, M, N,
            addend_stride_u, addend_stride_m, addend_stride_n, bias_stride, ACT, HAS_ADDEND, HAS_BIAS,
        )  # fmt: skip
        _store_columns(
            right, row, half + BLOCK_N // 2, user, known, addend_ptr, bias_ptr, out_ptr, M, N,
            addend_stride_u, addend_stride_m, addend_stride_n, bias_stride, ACT, HAS_ADDEND, HAS_BIAS,
        )  # fmt: skip
    else:
        _store_columns(
            acc, row, column, user, known, addend_ptr, bias_ptr, out_ptr, M, N,
            addend_stride_u, addend_stride_m, addend_stride_n, bias_stride, ACT, HAS_ADDEND, HAS_BIAS,
        )  # fmt: skip


# sizes that change from request to request must not compile a kernel anew
@triton.jit(do_not_specialize=["U", "M", "n_units", "k_units", "w_units_m", "e_units_k"])
def broadcast_lce_kernel(
    w_ptr,
    w_last_ptr,
    e_ptr,
    addend_ptr,
    bias_ptr,
    index_ptr,
    out_ptr,
    U,
    M,
    n_units,
    k_units,
    w_units_m,
    w_stride_k,
    e_stride_b,
    e_units_k,
    e_stride_n,
    addend_stride_u,
    addend_stride_m,
    addend_stride_n,
    bias_stride,
    index_stride,
    N_UNIT: tl.constexpr,
    K_UNIT: tl.constexpr,
    W_UNIT: tl.constexpr,
    E_UNIT: tl.constexpr,
    EVEN_N: tl.constexpr,
    ACT: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LAST_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALVES: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """One tile of `out [B, M, N]`; the tiles of a candidate follow each other and share its `E` in L2.

    The last tile of M is `LAST_M` rows high, so that an M just above a multiple of `BLOCK_M` wastes little. With
    `TMA`, `w_ptr`, `w_last_ptr` (for the last tile) and `e_ptr` are descriptors.
    """
    N = n_units * N_UNIT
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    tile = program % (tiles_m * tiles_n)
    candidate = (program // (tiles_m * tiles_n)).to(tl.int64)
    tile_m = tile % tiles_m
    row0 = tile_m * BLOCK_M
    column0 = tile // tiles_m * BLOCK_N
    K = k_units * K_UNIT
    w_stride_m = w_units_m * W_UNIT
    e_stride_k = e_units_k * E_UNIT
    out_ptr += candidate * M * N
    user = candidate
    known = True
    if HAS_ADDEND:
        user = tl.load(index_ptr + candidate * index_stride).to(tl.int64)
        known = (user >= 0) & (user < U)
    if LAST_M == BLOCK_M or tile_m < tiles_m - 1:
        _lce_tile(
            w_ptr, e_ptr, addend_ptr, bias_ptr, out_ptr, candidate, row0, column0, user, known, M, N, K,
            w_stride_m, w_stride_k, e_stride_b, e_stride_k, e_stride_n,
            addend_stride_u, addend_stride_m, addend_stride_n, bias_stride,
            EVEN_N, ACT, HAS_ADDEND, HAS_BIAS, BLOCK_M, BLOCK_N, BLOCK_K, HALVES, PRECISION, TMA,
        )  # fmt: skip
    else:
        _lce_tile(
            w_last_ptr, e_ptr, addend_ptr, bias_ptr, out_ptr, candidate, row0, column0, user, known, M, N, K,
            w_stride_m, w_stride_k, e_stride_b, e_stride_k, e_stride_n,
            addend_stride_u, addend_stride_m, addend_stride_n, bias_stride,
            EVEN_N, ACT, HAS_ADDEND, HAS_BIAS, LAST_M, BLOCK_N, BLOCK_K, HALVES, PRECISION, TMA,
        )  # fmt: skip
