"""Selections: ops that decide something by comparing computed floating-point values.

They are discontinuous, so their rounding errors cannot be measured by RMS. A program's selections are recorded and
replayed in float64, and what was chosen may be off from what float64 chooses only by what the scores may be off.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ikbo_cli.program import module_path, source_location
from ikbo_cli.verify.graphs import CASTS, MOVES

aten = torch.ops.aten

_PAIRS = {
    aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim, aten.min.dim, aten.kthvalue.default,
    aten.median.dim, aten.cummax.default, aten.cummin.default,
}  # fmt: skip
"""Ops that return values and indices; only the indices are discontinuous."""
_INDICES = {
    aten.argsort.default, aten.argsort.stable, aten.argmax.default, aten.argmin.default,
}  # fmt: skip
_COMPARISONS = {
    getattr(getattr(aten, name), kind)
    for name in ("gt", "ge", "lt", "le", "eq", "ne", "greater", "greater_equal", "less", "less_equal", "not_equal")
    for kind in ("Tensor", "Scalar")
}
_STEPS = {
    aten.round.default, aten.floor.default, aten.ceil.default, aten.trunc.default, aten.sign.default, aten.sgn.default,
    aten.round_.default, aten.floor_.default, aten.ceil_.default, aten.trunc_.default, aten.sign_.default,
}  # fmt: skip
_BUCKETS = {aten.bucketize.Tensor, aten.searchsorted.Tensor}


def selections(graph: fx.Graph) -> list[fx.Node]:
    """Nodes that select by computed values; inputs and parameters that are only moved are exact and decide nothing."""
    exact: set[fx.Node] = set()
    found = []
    for node in graph.nodes:
        if (
            node.op in ("placeholder", "get_attr")
            or not _floats(node.all_input_nodes)
            or (node.target in MOVES and all(n in exact for n in _floats(node.all_input_nodes)))
        ):
            exact.add(node)
        elif _selects(node) and any(n not in exact for n in _floats(node.all_input_nodes)):
            found.append(node)
    return found


def _floats(nodes: list[fx.Node]) -> list[fx.Node]:
    return [n for n in nodes if any(t.dtype.is_floating_point for t in _values(n))]


def _values(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    return [t for t in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(t, torch.Tensor)]


def _selects(node: fx.Node) -> bool:
    if node.target in _PAIRS:
        return any(user.target is operator.getitem and user.args[1] == 1 and user.users for user in node.users)
    if node.target in CASTS:
        return all(not t.dtype.is_floating_point for t in _values(node))
    return node.target in _INDICES | _COMPARISONS | _STEPS | _BUCKETS


def place_of(node: fx.Node) -> tuple[str, str | None, str | None]:
    """What is equal for one selection in a program and in its rewritten form: op, source line, module."""
    return str(node.target), source_location(node), module_path(node)


@dataclasses.dataclass(frozen=True)
class Choice:
    """One selection of one run: the arguments it read and what it chose (indices, booleans, or rounded values)."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    chosen: torch.Tensor

    @property
    def scores(self) -> torch.Tensor:
        """The values that it compared; for a comparison of two tensors their difference."""
        floats = [a for a in self.args if isinstance(a, torch.Tensor)]
        first = self.args[0]
        if len(floats) == 2 and isinstance(first, torch.Tensor):
            return floats[0].double() - floats[1].double() if self._broadcasts(floats) else floats[0].double()
        return floats[0].double()

    @staticmethod
    def _broadcasts(floats: list[torch.Tensor]) -> bool:
        try:
            torch.broadcast_shapes(*(f.shape for f in floats))
        except RuntimeError:
            return False
        return True


def chosen_of(node: fx.Node, result: Any) -> torch.Tensor:
    """The discontinuous part of a selection's result."""
    return result[1] if node.target in _PAIRS else result


def replay(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any], chosen: torch.Tensor) -> Any:
    """The result of a selection on float64 arguments when it has to choose `chosen`."""
    if node.target in _PAIRS:
        return [_at(node, args, kwargs, chosen), chosen]
    replayed = chosen.double() if chosen.dtype.is_floating_point else chosen.clone()
    if node.target in _STEPS and str(node.target).split(".")[1].endswith("_"):
        return args[0].copy_(replayed)
    return replayed


def regret(node: fx.Node, choice: Choice) -> torch.Tensor:
    """How far, in units of the scores, each element is from being what these (float64) scores choose; 0 where it is.

    Args:
        node: The selection.
        choice: Float64 arguments, and what was chosen.
    """
    target: Any = node.target
    args, kwargs, chosen = choice.args, choice.kwargs, choice.chosen
    if target in _PAIRS or target in _INDICES:
        ideal = target(*args, **kwargs)
        ideal = ideal[1] if target in _PAIRS else ideal
        return (_at(node, args, kwargs, chosen) - _at(node, args, kwargs, ideal)).abs()
    x = args[0].double() if isinstance(args[0], torch.Tensor) else args[0]
    if target in _COMPARISONS:
        gap = x - args[1]
        return torch.where(target(*args, **kwargs) != chosen, gap.abs(), torch.zeros_like(gap))
    if target in _BUCKETS:
        edges, x = (args[1], x) if target is aten.bucketize.Tensor else (args[0], args[1].double())
        padded = torch.nn.functional.pad(edges.double(), (1, 0), value=-torch.inf)
        padded = torch.nn.functional.pad(padded, (0, 1), value=torch.inf)
        low, high = _edge(padded, chosen), _edge(padded, chosen + 1)
    else:
        low, high = _interval(str(target).split(".")[1].rstrip("_"), chosen.double())
    return torch.maximum((low - x).clamp(min=0), (x - high).clamp(min=0))


def _edge(padded: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    if padded.dim() == 1:
        return padded[position.long()]
    return padded.gather(-1, position.long())


def _interval(name: str, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values that a rounding op maps to `chosen`."""
    if name == "floor":
        return chosen, chosen + 1
    if name == "ceil":
        return chosen - 1, chosen
    if name == "round":
        return chosen - 0.5, chosen + 0.5
    if name in ("sign", "sgn"):
        infinite = torch.full_like(chosen, torch.inf)
        zero = torch.zeros_like(chosen)
        return torch.where(chosen < 0, -infinite, zero), torch.where(chosen > 0, infinite, zero)
    # trunc, and casts to integers: towards zero.
    return torch.where(chosen > 0, chosen, chosen - 1), torch.where(chosen < 0, chosen, chosen + 1)


def _at(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any], indices: torch.Tensor) -> torch.Tensor:
    """The scores at the positions chosen."""
    scores = args[0].double()
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    whole = node.target in (aten.argmax.default, aten.argmin.default)
    dim = given.get("dim", None if whole else 0 if node.target in (aten.max.dim, aten.min.dim) else -1)
    if dim is None:
        return scores.flatten()[indices.flatten()].view(indices.shape)
    if indices.dim() == scores.dim():
        return scores.gather(dim, indices)
    return scores.gather(dim, indices.unsqueeze(dim)).squeeze(dim)
