"""Gradients by recomputing an operator's aten form, so that each operator states its maths once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef


def register_recompute(op: CustomOpDef, aten_form: Callable[..., Any]) -> None:
    """Let `op` differentiate through `aten_form`, which takes the operator's own positional arguments.

    Sums over candidates run in a fixed order (`gather_rows`), in float32 or wider.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.tensors_at = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.save_for_backward(*(inputs[i] for i in ctx.tensors_at))
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        args: list[Any] = list(ctx.others)
        wanted: list[tuple[int, Tensor]] = []
        for i, saved in zip(ctx.tensors_at, ctx.saved_tensors, strict=True):
            args[i] = saved.detach()
            if ctx.needs_input_grad[i]:
                args[i] = args[i].requires_grad_()
                wanted.append((i, args[i]))
        with torch.enable_grad():
            result = aten_form(*args)
        outputs = result if isinstance(result, tuple) else (result,)
        used = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        found = torch.autograd.grad(
            [o for o, _ in used], [t for _, t in wanted], [g for _, g in used], allow_unused=True
        )
        answer: list[Tensor | None] = [None] * len(args)
        for (i, _), gradient in zip(wanted, found, strict=True):
            answer[i] = gradient
        return tuple(answer)

    op.register_autograd(backward, setup_context=setup_context)
