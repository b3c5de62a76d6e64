"""The truth: a program interpreted in float64, one node at a time.

`.double()` on a module is not enough: casts, dtype arguments and dtype checks inside the graph stop it. Parameters are
lifted where they are read, and tables by the rows that are read, never whole.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

aten = torch.ops.aten

_TABLE_READS = {aten.embedding.default, aten.index_select.default, aten.index.Tensor, aten.gather.default}
_SELECTIONS = {
    aten.topk.default, aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable,
    aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim, aten.gt.Tensor, aten.ge.Tensor,
    aten.lt.Tensor, aten.le.Tensor, aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.eq.Tensor,
    aten.eq.Scalar, aten.ne.Tensor, aten.ne.Scalar, aten.round.default, aten.floor.default, aten.ceil.default,
    aten.sign.default,
}  # fmt: skip
_VALUES_AND_INDICES = {aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim, aten.min.dim}


def has_selections(module: fx.GraphModule) -> bool:
    """Whether a program decides something by comparing computed floating-point values."""
    return any(node.target in _SELECTIONS and _reads_floats(node) for node in module.graph.nodes)


def _reads_floats(node: fx.Node) -> bool:
    values = [n.meta.get("val") for n in node.all_input_nodes]
    computed = any(n.op == "call_function" for n in node.all_input_nodes)
    return computed and any(isinstance(v, torch.Tensor) and v.dtype.is_floating_point for v in values)


def record_selections(module: fx.GraphModule, args: Sequence[Any]) -> dict[str, Any]:
    """Run a program in its own precision and keep what its selections chose, by node name."""
    chosen: dict[str, Any] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n.target in _SELECTIONS and _reads_floats(n):
                chosen[n.name] = result
            return result

    with torch.no_grad():
        Recorder(module).run(*_cloned(args), enable_io_processing=False)
    return chosen


def run_reference(
    module: fx.GraphModule, args: Sequence[Any], selections: Mapping[str, Any] | None = None
) -> list[torch.Tensor]:
    """Interpret a program in float64.

    Args:
        module: The unlifted program.
        args: Its inputs in flat order, in their own dtypes.
        selections: What each selection node shall choose (of `record_selections`); None lets float64 decide.

    Returns:
        The outputs in flat order; floating-point ones in float64.
    """
    with torch.no_grad():
        result = _Float64(module, selections or {}).run(*[_lift(a) for a in _cloned(args)], enable_io_processing=False)
    return list(pytree.tree_leaves(result))


class _Float64(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, selections: Mapping[str, Any]) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.selections = selections

    def run_node(self, n: fx.Node) -> Any:
        if n.target is aten._assert_tensor_metadata.default:
            return None
        if n.op != "call_function" or n.target is operator.getitem:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target: Any = n.target
        if n.name in self.selections:
            return _replay(n, [_lift(a) for a in args], self.selections[n.name])
        if n.target in _TABLE_READS:
            return _lift(target(*args, **kwargs))
        lifted = [_lift_dtype(_lift(a)) for a in args]
        named = {key: _lift_dtype(_lift(value)) for key, value in kwargs.items()}
        return _lift(target(*lifted, **named))


def _replay(node: fx.Node, args: Sequence[Any], chosen: Any) -> Any:
    if node.target in _VALUES_AND_INDICES:
        _, indices = chosen
        dim = _axis(node)
        keep = indices.dim() == args[0].dim()
        picked = args[0].gather(dim, indices if keep else indices.unsqueeze(dim))
        return [picked if keep else picked.squeeze(dim), indices]
    return _lift(chosen)


def _axis(node: fx.Node) -> int:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return int(given.get("dim", -1))  # type: ignore[arg-type]


def _lift(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.dtype.is_floating_point and value.dtype != torch.float64 else value
    if isinstance(value, (list, tuple)):
        return [_lift(item) for item in value]
    return value


def _lift_dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _cloned(args: Sequence[Any]) -> list[Any]:
    """Inputs may be changed in place by the program."""
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
