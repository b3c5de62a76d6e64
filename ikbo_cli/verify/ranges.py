"""Which values are valid, element by element: followed from the inputs to the ops that use them as positions.

Input elements are numbered, and the numbers are sent through the graph's own ops: whatever an id input is cut, joined,
shifted or reordered into, each position that reaches a table still knows the input element it came from, so the columns
of a packed matrix get the ranges of their own tables. Nothing is computed with the numbers except shifts and clamps.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ikbo_cli.errors import InvalidInput
from ikbo_cli.program import source_location
from ikbo_cli.verify.graphs import CASTS, COPIES, GATHERS, MOVES, VIEWS

aten = torch.ops.aten

FAR = 1 << 40
"""Beyond every valid position."""
CONSTANT = -1
"""Number of an element that no input decides; `-2 - k` says that input `k` decides it in a way we cannot invert."""

_ADD = {aten.add.Tensor: 1, aten.add_.Tensor: 1, aten.add.Scalar: 1, operator.add: 1}
_SUB = {aten.sub.Tensor: -1, aten.sub_.Tensor: -1, aten.sub.Scalar: -1, operator.sub: -1}
_CLAMPS = {aten.clamp.default, aten.clamp_.default, aten.clip.default, aten.clamp_min.default, aten.clamp_max.default}
_WHOLE = {
    aten.round.default, aten.floor.default, aten.ceil.default, aten.trunc.default, aten.relu.default, aten.abs.default,
    aten.nan_to_num.default, aten.dropout.default,
}  # fmt: skip
"""Ops that leave non-negative whole numbers alone."""
_PADS = {aten.constant_pad_nd.default, aten.pad.default}
_MODULO = {aten.remainder.Scalar, aten.remainder.Tensor, aten.fmod.Scalar}
_ORDERED = {
    getattr(getattr(aten, name), kind)
    for name in ("gt", "ge", "lt", "le", "greater", "greater_equal", "less", "less_equal")
    for kind in ("Tensor", "Scalar")
}
_EQUALITY = {getattr(getattr(aten, name), kind) for name in ("eq", "ne") for kind in ("Tensor", "Scalar")}
_SAFE = {
    *_ORDERED, *_EQUALITY, aten.topk.default, aten.sort.default, aten.sort.stable, aten.argsort.default,
    aten.argsort.stable, aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim, aten.bucketize.Tensor,
    aten.searchsorted.Tensor, aten.nonzero.default, aten.logical_not.default, aten.logical_and.default,
    aten.logical_or.default, aten.bitwise_not.default, aten.any.dim, aten.all.dim, aten.isnan.default,
}  # fmt: skip
"""Ops whose results are valid wherever the author's own inputs made them valid: positions, booleans."""


@dataclasses.dataclass
class Demand:
    """What an input's values must be.

    Attributes:
        low: Smallest valid value of every element, int64; `-FAR` where nothing limits it.
        high: One more than the largest valid value; `FAR` where nothing limits it.
        soft_high: One more than the largest length that it is compared with; 0 where it is not.
        offsets: `(positions, ends)` when it holds the offsets of bags into so many positions; `ends`: it closes with
            their number.
        repeats: Rows that it must repeat up to, in all.
    """

    low: torch.Tensor
    high: torch.Tensor
    soft_high: torch.Tensor
    offsets: tuple[int, bool] | None = None
    repeats: int | None = None

    @property
    def limited(self) -> torch.Tensor:
        """Elements that serve as positions."""
        return self.high < FAR


@dataclasses.dataclass
class _Layer:
    """One possibility of where a tensor's elements come from: numbers, shifts, and bounds that clamps left."""

    ids: torch.Tensor
    shift: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor

    def map(self, call: Callable[[torch.Tensor], Any]) -> _Layer:
        """The same op on all four; an op with several results gives tuples."""
        return _Layer(call(self.ids), call(self.shift), call(self.low), call(self.high))


_Value = Any  # a list of layers, or what the node really computes where no input decides it, or _UNKNOWN
_UNKNOWN = object()


def demands(module: fx.GraphModule, size_of: Callable[[Any], int], total: int) -> dict[str, Demand]:
    """Follow every input to the ops that use it as a position.

    Args:
        module: The program, without nested graphs.
        size_of: Number of a symbolic size.
        total: Rows that repeats must add up to where the program does not say.

    Returns:
        By name, for each tensor input.

    Raises:
        InvalidInput: a position is computed from an input in a way that cannot be inverted.
    """
    return _Tracer(module, size_of, total).run()


class _Tracer:
    def __init__(self, module: fx.GraphModule, size_of: Callable[[Any], int], total: int) -> None:
        self.module = module
        self.size_of = size_of
        self.total = total
        self.values: dict[fx.Node, _Value] = {}
        self.inputs: list[fx.Node] = []
        self.first: dict[fx.Node, int] = {}
        self.gathered: set[str] = set()
        self.demanded: dict[str, Demand] = {}
        self.relevant = _relevant(module.graph)
        total_elements = 0
        for node in module.graph.nodes:
            if node in self.relevant and node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
                self.first[node] = total_elements
                self.inputs.append(node)
                total_elements += torch.Size(self._shape(node)).numel()
        # Of every numbered element.
        self.low = torch.full((total_elements,), -FAR)
        self.high = torch.full((total_elements,), FAR)
        self.soft = torch.zeros(total_elements, dtype=torch.int64)
        for node in self.inputs:
            shape = self._shape(node)
            part = slice(self.first[node], self.first[node] + torch.Size(shape).numel())
            self.demanded[node.name] = Demand(
                self.low[part].view(shape), self.high[part].view(shape), self.soft[part].view(shape)
            )

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(self.size_of(size) for size in node.meta["val"].shape)

    def run(self) -> dict[str, Demand]:
        for node in self.module.graph.nodes:
            if node in self.relevant:
                self.values[node] = self._value(node)
            for consumer in _consumers(node):
                self._consume(node, consumer)
        for name in self.gathered:
            _spread(self.demanded[name])
        return self.demanded

    # What a node's elements are.

    def _value(self, node: fx.Node) -> _Value:
        if node in self.first:
            shape = self._shape(node)
            ids = torch.arange(torch.Size(shape).numel()).view(shape) + self.first[node]
            return [_Layer(ids, torch.zeros_like(ids), torch.full_like(ids, -FAR), torch.full_like(ids, FAR))]
        value = node.meta.get("val")
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            return self._size(value)
        if node.op == "placeholder":
            return value
        if _is_safe(node):
            return self._safe(node)
        if node.op == "get_attr":
            found: Any = self.module
            for part in str(node.target).split("."):
                found = getattr(found, part)
            return found
        args = fx.map_arg(node.args, self.values.__getitem__)
        kwargs = fx.map_arg(node.kwargs, self.values.__getitem__)
        if not any(_is_layers(self.values[n]) or self.values[n] is _UNKNOWN for n in node.all_input_nodes):
            return _quietly(node.target, args, kwargs)
        return self._derived(node, list(args), dict(kwargs))

    def _safe(self, node: fx.Node) -> _Value:
        """Elements that are valid whatever the inputs are."""
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return _UNKNOWN
        try:
            zeros = torch.zeros(self._shape(node), dtype=torch.int64)
        except KeyError:
            return _UNKNOWN
        return [_Layer(torch.full_like(zeros, CONSTANT), zeros, zeros, zeros)]

    def _size(self, value: Any) -> Any:
        try:
            return self.size_of(value)
        except KeyError:
            return _UNKNOWN

    def _derived(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> _Value:
        target: Any = node.target
        if target is operator.getitem:
            if not _is_layers(args[0]):
                return self._opaque(node)
            return [layer.map(lambda t: t[args[1]]) for layer in args[0]]
        if target in CASTS or target in _WHOLE:
            return args[0] if _is_layers(args[0]) else self._opaque(node)
        if target in GATHERS:
            return self._gathered(node, args)
        if target in VIEWS | COPIES:
            return self._moved(node, args, kwargs)
        if target in _ADD or target in _SUB:
            return self._shifted(node, args, (_ADD | _SUB)[target] * kwargs.get("alpha", 1))
        if target in _CLAMPS:
            return self._clamped(node, args, kwargs)
        if target in _MODULO and isinstance(args[1], int):
            return self._bounded(node, 0, args[1])
        if target in (aten.mul.Tensor, aten.mul_.Tensor):
            for x, y in (node.args[:2], node.args[1::-1]):  # ids times a mask: the id, or 0
                if _is_mask(y) and isinstance(x, fx.Node) and _is_layers(self.values.get(x)):
                    return self._expanded(self.values[x], self._shape(node))
        if target in (aten.masked_fill.Scalar, aten.masked_fill_.Scalar) and _is_layers(args[0]):
            return self._expanded(args[0], self._shape(node))
        if target in (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf):
            sides = [side for side in args[1:] if _is_layers(side)]
            return [layer for side in sides for layer in self._expanded(side, self._shape(node))] or self._opaque(node)
        return self._opaque(node)

    def _expanded(self, layers: list[_Layer], shape: Sequence[int]) -> list[_Layer]:
        return [layer.map(lambda t: t.expand(shape)) for layer in layers]

    def _moved(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> _Value:
        """The op on the numbers of all its tensor arguments; where there are several possibilities, each in turn."""
        several = isinstance(node.args[0], (list, tuple))
        nodes: Sequence[Any] = node.args[0] if several else [node.args[0]]  # type: ignore[assignment]
        known = [self._as_layers(n, v) for n, v in zip(nodes, args[0] if several else [args[0]], strict=True)]
        rest = [_shape_giver(value) for value in args[1:]]
        if any(value is None for value in known) or _UNKNOWN in pytree.tree_leaves(rest):
            return self._opaque(node)
        if node.target in _PADS:
            rest, kwargs = [rest[0]], {}
        result = []
        for number in range(max(len(value) for value in known if value)):
            parts = [value[min(number, len(value) - 1)] for value in known if value]

            def call(field: str, parts: list[_Layer] = parts) -> Any:
                tensors = [getattr(part, field) for part in parts]
                if node.target in _PADS:
                    return aten.constant_pad_nd.default(tensors[0], rest[0], CONSTANT if field == "ids" else 0)
                return _quietly(node.target, [tensors if several else tensors[0], *rest], kwargs)

            result.append(_Layer(call("ids"), call("shift"), call("low"), call("high")))
        return result

    def _as_layers(self, node: Any, value: _Value) -> list[_Layer] | None:
        if _is_layers(value):
            return list(value)
        if isinstance(value, torch.Tensor):
            fixed = value if not value.dtype.is_floating_point else value.nan_to_num().clamp(-FAR, FAR)
            fixed = fixed.long()
            return [_Layer(torch.full_like(fixed, CONSTANT), fixed, fixed, fixed)]
        if isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor):
            opaque = self._opaque(node)
            return opaque if _is_layers(opaque) else None
        return None

    def _gathered(self, node: fx.Node, args: list[Any]) -> _Value:
        """Elements at positions not known yet: every row in turn, which stands for any row."""
        source = args[0]
        if not _is_layers(source):
            return self._opaque(node)
        rank = source[0].ids.dim()
        if node.target is aten.index.Tensor:
            positions = [(axis, p) for axis, p in enumerate(node.args[1]) if p is not None]  # type: ignore[arg-type]
            if len(positions) != 1 or positions[0][1].meta["val"].dtype == torch.bool:
                return self._opaque(node)
            axis, index = positions[0]
        elif node.target is aten.repeat_interleave.self_Tensor:
            axis, index = (args[2] if len(args) > 2 and args[2] is not None else 0), None
        else:
            axis, index = args[1] % max(rank, 1), node.args[2]
        for layer in source:
            self._note_gathered(layer)
        shape = self._shape(node)
        size = source[0].ids.shape[axis]
        if size == 0:
            return self._opaque(node)
        if node.target in (aten.gather.default, aten.take_along_dim.default):
            rows = torch.arange(shape[axis]) % size
            wide = rows.view([-1 if d == axis else 1 for d in range(rank)]).expand(shape)
            return [layer.map(lambda t: t.gather(axis, wide)) for layer in source]
        inner = self._shape(index) if isinstance(index, fx.Node) else (shape[axis],)
        rows = torch.arange(torch.Size(inner).numel()) % size
        return [layer.map(lambda t: t.index_select(axis, rows).reshape(shape)) for layer in source]

    def _note_gathered(self, layer: _Layer) -> None:
        for node in self.inputs:
            part = self._part(node)
            if bool(((layer.ids >= part.start) & (layer.ids < part.stop)).any()):
                self.gathered.add(node.name)

    def _part(self, node: fx.Node) -> slice:
        return slice(self.first[node], self.first[node] + self.demanded[node.name].low.numel())

    def _shifted(self, node: fx.Node, args: list[Any], sign: int) -> _Value:
        layers, other = args[0], args[1]
        if not _is_layers(layers) and sign == 1:
            layers, other = other, layers
        if not _is_layers(layers) or not isinstance(other, (int, float, torch.Tensor)):
            return self._opaque(node)
        delta = sign * torch.as_tensor(other)
        if delta.dtype.is_floating_point:
            if not bool((delta == delta.round()).all()):
                return self._opaque(node)
            delta = delta.long()
        shape = self._shape(node)
        return [
            _Layer(layer.ids.expand(shape), *(t.expand(shape) + delta for t in (layer.shift, layer.low, layer.high)))
            for layer in layers
        ]

    def _clamped(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> _Value:
        if not _is_layers(args[0]):
            return self._opaque(node)
        low = kwargs.get("min", args[1] if len(args) > 1 and node.target is not aten.clamp_max.default else None)
        high = kwargs.get("max", args[2] if len(args) > 2 else None)
        if node.target is aten.clamp_max.default:
            high = args[1]
        if low is _UNKNOWN or high is _UNKNOWN:
            return self._opaque(node)
        return [
            _Layer(
                layer.ids,
                layer.shift,
                layer.low if low is None else layer.low.clamp(min=int(low)),
                layer.high if high is None else layer.high.clamp(max=int(high)),
            )
            for layer in args[0]
        ]

    def _opaque(self, node: fx.Node) -> list[_Layer] | Any:
        return self._bounded(node, -FAR, FAR)

    def _bounded(self, node: fx.Node, low: int, high: int) -> list[_Layer] | Any:
        """Values that depend on inputs in a way that cannot be inverted, within `[low, high)`."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return _UNKNOWN
        try:
            shape = self._shape(node)
        except KeyError:
            return _UNKNOWN
        ids = torch.full(shape, -2 - self._origin(node))
        return [_Layer(ids, torch.zeros_like(ids), torch.full_like(ids, low), torch.full_like(ids, high - 1))]

    def _origin(self, node: fx.Node) -> int:
        """The integer input that a node depends on first, else any input."""
        seen, stack, found = {node}, [node], []
        while stack:
            for other in stack.pop().all_input_nodes:
                if other in self.first:
                    found.append(other)
                elif other not in seen:
                    seen.add(other)
                    stack.append(other)
        whole = [n for n in found if not n.meta["val"].dtype.is_floating_point]
        return self.inputs.index((whole or found or self.inputs)[0])

    # What is asked of it.

    def _consume(self, node: fx.Node, consumer: _Consumer) -> None:
        layers = self.values.get(consumer.positions)
        if not _is_layers(layers):
            return
        for layer in layers:
            if consumer.role == "position":
                self._limit(node, layer, consumer)
            elif consumer.role == "compared":
                self._compare(layer, consumer)
            else:
                self._whole_input(node, layer, consumer)

    def _limit(self, node: fx.Node, layer: _Layer, consumer: _Consumer) -> None:
        size = self.size_of(consumer.size)
        low = torch.where(layer.low < 0, -layer.shift, -FAR)
        high = torch.where(layer.high >= size, size - layer.shift, FAR)
        opaque = (layer.ids < CONSTANT) & ((low > -FAR) | (high < FAR))
        if bool(opaque.any()):
            source = self.inputs[-2 - int(layer.ids[opaque][0])]
            raise InvalidInput(
                f"valid values of input {source.name!r} cannot be derived: {node.target} reads computed positions",
                hint="give a saved batch of real inputs with --sample",
                node=node.name,
                source=source_location(node),
            )
        numbers = layer.ids.flatten()
        ours = numbers >= 0
        self.low.scatter_reduce_(0, numbers[ours], low.flatten()[ours], "amax")
        self.high.scatter_reduce_(0, numbers[ours], high.flatten()[ours], "amin")

    def _compare(self, layer: _Layer, consumer: _Consumer) -> None:
        """Compared with a range of positions: a length, which may reach the end of the range."""
        other = self.values.get(consumer.size) if isinstance(consumer.size, fx.Node) else None
        if not isinstance(other, torch.Tensor) or other.numel() < 2 or other.dtype.is_floating_point:
            return
        numbers = layer.ids.flatten()
        ours = numbers >= 0
        self.soft.scatter_reduce_(0, numbers[ours], (int(other.max()) + 2 - layer.shift).flatten()[ours], "amax")

    def _whole_input(self, node: fx.Node, layer: _Layer, consumer: _Consumer) -> None:
        """Bag offsets and repeats: the input itself, in its own order."""
        source = next(
            (n for n in self.inputs if layer.ids.numel() and self.first[n] == int(layer.ids.flatten()[0])), None
        )
        if source is None or layer.ids.numel() != self.demanded[source.name].low.numel():
            origin = self.inputs[self._origin(consumer.positions)]
            raise InvalidInput(
                f"valid values of input {origin.name!r} cannot be derived: {node.target} needs {consumer.role}",
                hint="give a saved batch of real inputs with --sample",
                node=node.name,
                source=source_location(node),
            )
        demand = self.demanded[source.name]
        if consumer.role == "offsets":
            demand.offsets = (self.size_of(consumer.size), consumer.ends)
        else:
            try:
                demand.repeats = self.size_of(consumer.size)
            except KeyError:
                demand.repeats = self.total


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """An op that reads `positions`, each within `size`; `role` is `position`, `compared`, `offsets` or `repeats`."""

    positions: fx.Node
    size: Any
    role: str = "position"
    ends: bool = False


def _consumers(node: fx.Node) -> list[_Consumer]:
    if node.op != "call_function":
        return []
    target, args = node.target, node.args
    if target is aten.embedding.default:
        return [_Consumer(args[1], _size(args[0], 0))]  # type: ignore[arg-type]
    if target in (aten.embedding_bag.default, aten.embedding_bag.padding_idx):
        found = [_Consumer(args[1], _size(args[0], 0))]  # type: ignore[arg-type]
        ends = bool(args[7]) if len(args) > 7 else bool(node.kwargs.get("include_last_offset", False))
        return [*found, _Consumer(args[2], _size(args[1], 0), "offsets", ends)]  # type: ignore[arg-type]
    if target in (
        aten.index_select.default, aten.gather.default, aten.take_along_dim.default, aten.scatter.src,
        aten.scatter.value, aten.scatter_add.default, aten.index_add.default, aten.index_copy.default,
    ) and isinstance(args[2], fx.Node):  # fmt: skip
        return [_Consumer(args[2], _size(args[0], args[1]))]
    if target in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        picks = [(axis, p) for axis, p in enumerate(args[1]) if p is not None]  # type: ignore[arg-type]
        return [_Consumer(p, _size(args[0], a)) for a, p in picks if p.meta["val"].dtype != torch.bool]
    if target is aten.one_hot.default and len(args) > 1 and args[1] != -1:
        return [_Consumer(args[0], args[1])]  # type: ignore[arg-type]
    if target is aten.repeat_interleave.self_Tensor:
        return [_Consumer(args[1], _size(node, args[2] if len(args) > 2 and args[2] is not None else 0), "repeats")]  # type: ignore[arg-type]
    if target is aten.repeat_interleave.Tensor:
        return [_Consumer(args[0], _size(node, 0), "repeats")]  # type: ignore[arg-type]
    if target in _ORDERED and all(_holds_integers(a) for a in args[:2]):
        return [_Consumer(args[0], args[1], "compared"), _Consumer(args[1], args[0], "compared")]  # type: ignore[arg-type]
    return []


def _holds_integers(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and not value.dtype.is_floating_point


def _size(node: Any, axis: Any) -> Any:
    return node.meta["val"].shape[axis]


def _relevant(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that positions are made of."""
    asked = [consumer for node in graph.nodes for consumer in _consumers(node)]
    stack = [c.positions for c in asked] + [c.size for c in asked if isinstance(c.size, fx.Node)]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if _is_safe(node) or isinstance(node.meta.get("val"), (int, torch.SymInt)):
            continue
        for other in node.all_input_nodes:
            if other not in seen:
                seen.add(other)
                stack.append(other)
    return seen


def _is_safe(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and node.args[0].target in _SAFE
    return node.target in _SAFE


def _shape_giver(value: _Value) -> Any:
    """An argument that only lends its shape or a size."""
    return value[0].ids if _is_layers(value) else value


def _is_layers(value: Any) -> TypeGuard[list[_Layer]]:
    return isinstance(value, list) and bool(value) and isinstance(value[0], _Layer)


def _is_mask(node: Any) -> bool:
    """A boolean tensor, or one cast to a number."""
    while isinstance(node, fx.Node):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype == torch.bool:
            return True
        if node.target not in MOVES or not node.args or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
    return False


def _quietly(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with torch.no_grad():
        return target(*args, **kwargs)


def _spread(demand: Demand) -> None:
    """What is asked of some rows is asked of all: which row a gather reads is another input's choice."""
    if demand.low.dim() and demand.low.numel():
        demand.low.copy_(demand.low.amax(0, keepdim=True).expand(demand.low.shape).clone())
        demand.high.copy_(demand.high.amin(0, keepdim=True).expand(demand.high.shape).clone())
