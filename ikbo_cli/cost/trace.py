"""Concrete shapes of every node at one workload: the graph run once on fake tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

Spec: TypeAlias = "tuple[tuple[int, ...], torch.dtype] | int | float | bool | None"
"""One input: shape and dtype, or a plain number."""


def trace(module: fx.GraphModule, inputs: Sequence[Spec], sizes: dict[str, int] | None = None) -> dict[fx.Node, Any]:
    """Run the graph on fake tensors of the given shapes.

    Sizes that depend on data come from what export recorded for the node, with `sizes` for its symbols.

    Returns:
        For every node its fake tensor (static shape), number, or list of them; None where nothing is known.
    """
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for node in module.graph.nodes:
            if node.op == "placeholder":
                spec = next(given)
                values[node] = torch.empty(spec[0], dtype=spec[1]) if isinstance(spec, tuple) else spec
            elif node.op == "get_attr":
                recorded = node.meta.get("val")
                values[node] = (
                    torch.empty_strided(tuple(recorded.shape), recorded.stride(), dtype=recorded.dtype)
                    if isinstance(recorded, torch.Tensor)
                    else None
                )
            elif node.op == "call_function":
                values[node] = _run(node, values, sizes or {})
    return values


def _run(node: fx.Node, values: dict[fx.Node, Any], sizes: dict[str, int]) -> Any:
    args = fx.map_arg(node.args, lambda n: values[n])
    kwargs = fx.map_arg(node.kwargs, lambda n: values[n])
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:
        return _recorded(node.meta.get("val"), sizes)


def _recorded(value: Any, sizes: dict[str, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_recorded(item, sizes) for item in value]
    try:
        if isinstance(value, torch.Tensor):
            return torch.empty([_size(s, sizes) for s in value.shape], dtype=value.dtype)
        return _size(value, sizes) if isinstance(value, torch.SymInt) else value
    except (TypeError, KeyError, ValueError):
        return None


def _size(size: Any, sizes: dict[str, int]) -> int:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    default = max(sizes.values(), default=1)
    return int(expression.subs({s: sizes.get(str(s), default) for s in expression.free_symbols}))
