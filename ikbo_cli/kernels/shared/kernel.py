"""Device functions that several kernels call."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Tanh of float32 `x`; a series where `1 - exp(-2x)` would cancel."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315))))
    decay = tl.exp(-2.0 * tl.abs(x))
    closed = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.2, series, tl.where(x < 0, -closed, closed))


@triton.jit
def activate(x, ACT: tl.constexpr):
    """Activation of float32 `x`, by code: see `ACTIVATIONS`."""
    if ACT == 1:
        return tl.where(x < 0, 0.0, x)  # NaN passes, as in torch.relu
    elif ACT == 2:
        return tl.sigmoid(x)
    elif ACT == 3:
        return tanh(x)
    elif ACT == 4:
        return x * tl.sigmoid(x)
    elif ACT == 5:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        return x
