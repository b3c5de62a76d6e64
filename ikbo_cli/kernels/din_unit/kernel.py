"""The whole DIN attention unit of a candidate in one program: README.md derives the merged first layer."""

import triton
import triton.language as tl

from ikbo_cli.kernels.shared.kernel import activate


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    """Sigmoid of float32 `x`; FAST takes one special-function operation, within 5e-4 of the exact value."""
    if FAST:
        half = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x * 0.5], dtype=tl.float32, is_pure=True, pack=1
        )
        return half * 0.5 + 0.5
    else:
        return tl.sigmoid(x)


@triton.jit
def _activate(x, unit, params_ptr, params_stride_r, params_stride_n, N, ACT: tl.constexpr, FAST: tl.constexpr):
    """Activation of `x [rows, units]`; codes above the shared ones take a row of numbers a unit."""
    if ACT == 2:
        return _sigmoid(x, FAST)
    elif ACT == 6:  # PReLU: slope
        at = params_ptr + unit * params_stride_n
        slope = tl.load(at, mask=unit < N, other=0.0).to(tl.float32)[None, :]
        return tl.where(x < 0, x * slope, x)
    elif ACT == 7:  # Dice: slope, scale and shift of the gate
        at = params_ptr + unit * params_stride_n
        slope = tl.load(at, mask=unit < N, other=0.0).to(tl.float32)[None, :]
        scale = tl.load(at + params_stride_r, mask=unit < N, other=0.0).to(tl.float32)[None, :]
        shift = tl.load(at + 2 * params_stride_r, mask=unit < N, other=0.0).to(tl.float32)[None, :]
        gate = _sigmoid(x * scale + shift, FAST)
        return x * (slope + gate * (1.0 - slope))
    else:
        return activate(x, ACT)


@triton.jit
def _first_layer(
    w1_ptr,
    b1_ptr,
    q,
    unit,
    column,
    w1_stride_n,
    w1_stride_k,
    b1_stride,
    N,
    D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Per-candidate weights `[units, D]` on the key, and constants `[units]`, both float32.

    `W1 q + W2 k + W3 (q - k) + W4 (q k) = (W2 - W3 + W4 diag(q)) k + (W1 + W3) q`
    """
    inside = (unit < N)[:, None] & (column < D)[None, :]
    at = w1_ptr + (unit[:, None] * w1_stride_n + column[None, :] * w1_stride_k)
    on_query = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    on_key = tl.load(at + D * w1_stride_k, mask=inside, other=0.0).to(tl.float32)
    on_difference = tl.load(at + 2 * D * w1_stride_k, mask=inside, other=0.0).to(tl.float32)
    on_product = tl.load(at + 3 * D * w1_stride_k, mask=inside, other=0.0).to(tl.float32)
    constant = tl.sum((on_query + on_difference) * q[None, :], 1)
    if HAS_BIAS:
        constant += tl.load(b1_ptr + unit * b1_stride, mask=unit < N, other=0.0).to(tl.float32)
    return on_key - on_difference + on_product * q[None, :], constant


@triton.jit
def _second_layer(
    h_a,
    h_b,
    w2_ptr,
    b2_ptr,
    params_ptr,
    w_out_ptr,
    unit,
    h1,
    w2_stride_n,
    w2_stride_k,
    b2_stride,
    params_stride_r,
    params_stride_n,
    w_out_stride,
    N,
    ACT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """Scores `[rows]` that some units of the second layer contribute."""
    column = tl.arange(0, BLOCK_A)
    inside = (column < h1)[:, None] & (unit < N)[None, :]
    at = w2_ptr + column[:, None] * w2_stride_k + unit[None, :] * w2_stride_n
    x = tl.dot(h_a, tl.load(at, mask=inside, other=0.0), input_precision=PRECISION)
    if BLOCK_B > 0:
        column_b = BLOCK_A + tl.arange(0, BLOCK_B)
        inside_b = (column_b < h1)[:, None] & (unit < N)[None, :]
        at_b = w2_ptr + column_b[:, None] * w2_stride_k + unit[None, :] * w2_stride_n
        x = tl.dot(h_b, tl.load(at_b, mask=inside_b, other=0.0), x, input_precision=PRECISION)
    if HAS_BIAS:
        x += tl.load(b2_ptr + unit * b2_stride, mask=unit < N, other=0.0).to(tl.float32)[None, :]
    x = _activate(x, unit, params_ptr, params_stride_r, params_stride_n, N, ACT, FAST)
    w_out = tl.load(w_out_ptr + unit * w_out_stride, mask=unit < N, other=0.0).to(tl.float32)
    return tl.sum(x * w_out[None, :], 1)


# sizes that change from request to request must not compile a kernel anew
@triton.jit(do_not_specialize=["U", "L", "H1", "H2"])
def din_unit_kernel(
    q_ptr,
    k_ptr,
    index_ptr,
    lengths_ptr,
    mask_ptr,
    w1_ptr,
    b1_ptr,
    params1_ptr,
    w2_ptr,
    b2_ptr,
    params2_ptr,
    w_out_ptr,
    b_out_ptr,
    out_ptr,
    U,
    L,
    H1,
    H2,
    scale,
    q_stride_b,
    q_stride_d,
    k_stride_u,
    k_stride_l,
    k_stride_d,
    index_stride,
    mask_stride_u,
    mask_stride_l,
    w1_stride_n,
    w1_stride_k,
    b1_stride,
    params1_stride_r,
    params1_stride_n,
    w2_stride_n,
    w2_stride_k,
    b2_stride,
    params2_stride_r,
    params2_stride_n,
    w_out_stride,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    A1: tl.constexpr,
    B1: tl.constexpr,
    A2: tl.constexpr,
    B2: tl.constexpr,
    ACT: tl.constexpr,
    HAS_B1: tl.constexpr,
    HAS_B2: tl.constexpr,
    HAS_OUT_BIAS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    MASK: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NAN_IF_EMPTY: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """One candidate: scores of its user's keys, `BLOCK_L` at a time, and their weighted sum.

    The first layer has `A1 + B1` units (the second part may be 0), the second `A2 + B2` (0: no second layer):
    powers of two that cover `H1` and `H2` with little padding.
    """
    candidate = tl.program_id(0).to(tl.int64)
    scale = tl.full([], scale, tl.float32)  # a compiler may pass it as float64
    column = tl.arange(0, BLOCK_D)
    in_depth = column < D
    user = tl.load(index_ptr + candidate * index_stride).to(tl.int64)
    out_ptr += candidate * D
    if (user < 0) | (user >= U):
        tl.store(out_ptr + column, tl.full([BLOCK_D], float("nan"), out_ptr.dtype.element_ty), mask=in_depth)
        return
    q = tl.load(q_ptr + candidate * q_stride_b + column * q_stride_d, mask=in_depth, other=0.0).to(tl.float32)
    dtype = k_ptr.dtype.element_ty
    unit_a = tl.arange(0, A1)
    weights, constant_a = _first_layer(
        w1_ptr, b1_ptr, q, unit_a, column, w1_stride_n, w1_stride_k, b1_stride, H1, D, HAS_B1
    )
    weights_a = tl.trans(weights.to(dtype))  # [BLOCK_D, A1]
    unit_b = A1 + tl.arange(0, B1 if B1 > 0 else 16)
    weights_b = weights_a
    constant_b = constant_a
    if B1 > 0:
        weights, constant_b = _first_layer(
            w1_ptr, b1_ptr, q, unit_b, column, w1_stride_n, w1_stride_k, b1_stride, H1, D, HAS_B1
        )
        weights_b = tl.trans(weights.to(dtype))
    bias = 0.0
    if HAS_OUT_BIAS:
        bias = tl.load(b_out_ptr).to(tl.float32)

    end = L
    if HAS_LENGTHS:
        end = tl.minimum(L, tl.load(lengths_ptr + user).to(tl.int32))
    k_ptr += user * k_stride_u
    if MASK != 0:
        mask_ptr += user * mask_stride_u
    acc = tl.zeros([BLOCK_L, BLOCK_D], tl.float32)
    top = -float("inf")
    total = 0.0
    for start in range(0, end, BLOCK_L):
        key = start + tl.arange(0, BLOCK_L)
        inside = (key < end)[:, None] & in_depth[None, :]
        at = key.to(tl.int64)[:, None] * k_stride_l + column[None, :] * k_stride_d
        k = tl.load(k_ptr + at, mask=inside, other=0.0)  # [BLOCK_L, BLOCK_D]
        x = tl.dot(k, weights_a, input_precision=PRECISION) + constant_a[None, :]
        h_a = _activate(x, unit_a, params1_ptr, params1_stride_r, params1_stride_n, H1, ACT, FAST)
        h_b = h_a
        if B1 > 0:
            x = tl.dot(k, weights_b, input_precision=PRECISION) + constant_b[None, :]
            h_b = _activate(x, unit_b, params1_ptr, params1_stride_r, params1_stride_n, H1, ACT, FAST)
        if A2 > 0:
            h_a = h_a.to(dtype)
            h_b = h_b.to(dtype)
            score = _second_layer(
                h_a, h_b, w2_ptr, b2_ptr, params2_ptr, w_out_ptr, tl.arange(0, A2), H1, w2_stride_n,
                w2_stride_k, b2_stride, params2_stride_r, params2_stride_n, w_out_stride, H2,
                ACT, HAS_B2, A1, B1, PRECISION, FAST,
            )  # fmt: skip
            if B2 > 0:
                score += _second_layer(
                    h_a, h_b, w2_ptr, b2_ptr, params2_ptr, w_out_ptr, A2 + tl.arange(0, B2), H1, w2_stride_n,
                    w2_stride_k, b2_stride, params2_stride_r, params2_stride_n, w_out_stride, H2,
                    ACT, HAS_B2, A1, B1, PRECISION, FAST,
                )  # fmt: skip
        else:
            w_out = tl.load(w_out_ptr + unit_a * w_out_stride, mask=unit_a < H1, other=0.0).to(tl.float32)
            score = tl.sum(h_a * w_out[None, :], 1)
            if B1 > 0:
                w_out = tl.load(w_out_ptr + unit_b * w_out_stride, mask=unit_b < H1, other=0.0).to(tl.float32)
                score += tl.sum(h_b * w_out[None, :], 1)
        score = (score + bias) * scale
        kept = key < end
        if MASK == 1:
            kept &= tl.load(mask_ptr + key.to(tl.int64) * mask_stride_l, mask=kept, other=0) != 0
        elif MASK == 2:
            extra = tl.load(mask_ptr + key.to(tl.int64) * mask_stride_l, mask=kept, other=0.0)
            score += extra.to(tl.float32)
        if SOFTMAX:
            score = tl.where(kept, score, -float("inf"))
            new_top = tl.maximum(top, tl.max(score, 0))
            shift = tl.where(new_top == -float("inf"), 0.0, new_top)
            decay = tl.exp(top - shift)
            score = tl.exp(score - shift)
            total = total * decay + tl.sum(score, 0)
            acc = acc * decay
            top = new_top
        else:
            score = tl.where(kept, score, 0.0)
        acc += score[:, None] * k.to(tl.float32)
    result = tl.sum(acc, 0)
    if SOFTMAX:
        result = result / tl.where(top == -float("inf"), 1.0, total)
        if NAN_IF_EMPTY:
            result = tl.where(top == -float("inf"), float("nan"), result)
    tl.store(out_ptr + column, result.to(out_ptr.dtype.element_ty), mask=in_depth)
