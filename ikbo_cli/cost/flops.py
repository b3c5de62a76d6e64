"""FLOPs of one op from the shapes of its arguments. A multiply-add is two."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
Formula = Callable[[Sequence[Any], Any], float]

GEMM: dict[Any, Formula] = {}
"""Ops whose work is matrix products, with their FLOPs from (arguments, result)."""


def register_flops(*ops: Any) -> Callable[[Formula], Formula]:
    """Register the matrix-product FLOPs of ops: `formula(args, result) -> flops`."""

    def register(formula: Formula) -> Formula:
        for op in ops:
            GEMM[op] = formula
        return formula

    return register


@register_flops(aten.linear.default)
def _linear(args: Sequence[Any], out: Any) -> float:
    return 2.0 * out.numel() * args[0].shape[-1]


@register_flops(aten.mm.default, aten.bmm.default, aten.matmul.default, aten.mv.default)
def _matmul(args: Sequence[Any], out: Any) -> float:
    return 2.0 * out.numel() * args[0].shape[-1]


@register_flops(aten.addmm.default, aten.baddbmm.default)
def _addmm(args: Sequence[Any], out: Any) -> float:
    return 2.0 * out.numel() * args[1].shape[-1]


@register_flops(aten.einsum.default)
def _einsum(args: Sequence[Any], out: Any) -> float:
    sizes: dict[str, int] = {}
    for letters, operand in zip(args[0].replace(" ", "").split("->")[0].split(","), args[1], strict=False):
        sizes.update(zip(letters, operand.shape, strict=False))
    return (2.0 if len(args[1]) > 1 else 1.0) * math.prod(sizes.values())


@register_flops(aten.scaled_dot_product_attention.default)
def _attention(args: Sequence[Any], out: Any) -> float:
    query, key, value = args[:3]
    rows = math.prod(query.shape[:-1])
    return 2.0 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])


@register_flops(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv1d.padding, aten.conv2d.padding)
def _conv(args: Sequence[Any], out: Any) -> float:
    return 2.0 * out.numel() * math.prod(args[1].shape[1:])


@register_flops(aten.gru.input, aten.lstm.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def _recurrent(args: Sequence[Any], out: Any) -> float:
    steps = args[0].shape[0] * args[0].shape[1]
    return 2.0 * steps * sum(p.numel() for p in args[2] if p.dim() == 2)


VIEWS = {
    aten.view.default, aten.permute.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.squeeze.default, aten.expand.default, aten.select.int, aten.slice.Tensor,
    aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int, aten.t.default,
    aten.detach.default, aten.alias.default, aten.unflatten.int, aten.sym_size.int, aten.narrow.default,
    aten.expand_as.default, aten.view_as.default, aten.swapaxes.default, aten.movedim.int, aten.mT.default,
    aten.dropout.default,
}  # fmt: skip
MAYBE_VIEWS = {
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.contiguous.default,
    aten.to.dtype,
    aten.to.device,
}

TRANSCENDENTAL = {
    "exp": 5.0, "log": 5.0, "sigmoid": 2.0, "tanh": 16.0, "gelu": 2.0, "silu": 2.5, "softmax": 6.0, "log_softmax": 6.0,
    "_softmax": 6.0, "pow": 6.0, "sin": 6.0, "cos": 6.0, "erf": 4.0, "softplus": 8.0, "elu": 5.0, "prelu": 1.0,
    "logsumexp": 6.0, "layer_norm": 4.0, "batch_norm": 2.0, "mish": 10.0, "sort": 100.0, "topk": 20.0, "argsort": 100.0,
    "log1p": 6.0, "expm1": 6.0, "rsqrt": 2.0, "sqrt": 2.0, "div": 1.0,
}  # fmt: skip
"""Work an element of ops that cost more than one add, in adds (measured on one core where it mattered)."""


def op_name(op: Any) -> str:
    """Bare name of an op: `aten::relu_` -> `relu`."""
    name = op._schema.name.partition("::")[2] if hasattr(op, "_schema") else getattr(op, "__name__", str(op))
    return name if name.startswith("__") else name.rstrip("_")


def elementwise_work(op: Any) -> float:
    """Adds an element."""
    return TRANSCENDENTAL.get(op_name(op), 1.0)
