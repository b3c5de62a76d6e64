"""Row gather of a float32 addend, added to candidate rows in one pass."""

import triton
import triton.language as tl

from ikbo_cli.kernels.shared.kernel import activate


# sizes that change from request to request must not compile a kernel anew
@triton.jit(do_not_specialize=["rows", "U"])
def gather_add_kernel(
    x_ptr,
    addend_ptr,
    bias_ptr,
    index_ptr,
    out_ptr,
    rows,
    U,
    T,
    N,
    x_stride_b,
    x_stride_t,
    x_stride_n,
    addend_stride_u,
    addend_stride_t,
    addend_stride_n,
    bias_stride,
    index_stride,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (row block, column block) of `out [B * T, N]`, rows ordered candidate first."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < rows
    inside = is_row[:, None] & (column < N)[None, :]
    candidate = row // T
    step = row % T
    user = tl.load(index_ptr + candidate * index_stride, mask=is_row, other=0).to(tl.int64)
    known = (user >= 0) & (user < U)
    x_at = (candidate * x_stride_b + step * x_stride_t)[:, None] + column[None, :] * x_stride_n
    x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
    addend_at = (user * addend_stride_u + step * addend_stride_t)[:, None] + column[None, :] * addend_stride_n
    x += tl.load(addend_ptr + addend_at, mask=inside & known[:, None], other=float("nan"))
    if HAS_BIAS:
        x += tl.load(bias_ptr + column * bias_stride, mask=column < N, other=0.0).to(tl.float32)[None, :]
    x = activate(x, ACT)
    out = out_ptr + row[:, None] * N + column[None, :]
    tl.store(out, x.to(out_ptr.dtype.element_ty), mask=inside)
