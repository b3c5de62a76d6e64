"""What rules work with: emit ops, materialize values, ask whether a rewrite may fire.

Two contexts share all of it: `GraphContext` (walk.py) emits nodes, `EagerContext` runs ops on real tensors.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ikbo_cli.broadcast.maps import Expand, Gather, Map, Repeat, Step, Tile
from ikbo_cli.broadcast.registry import RULES
from ikbo_cli.broadcast.values import (
    Broadcast,
    Concat,
    Full,
    Node,
    Scalar,
    Sum,
    Uniform,
    Value,
    broadcasts_in,
    has_broadcast,
    hint,
    is_tensor,
    shape_of,
    val,
)

aten = torch.ops.aten

MATERIALIZED = "reads the user rows as they are: no user-side work to save here"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a rewrite is not applied: invalid here, switched off, or it does not pay."""

    reason: str
    declined: bool = False


@dataclasses.dataclass
class SiteRecord:
    """What happened at one op of the original program that reads expanded user values."""

    origin: str
    op: str
    inputs: list[Broadcast]
    code: str | None = None
    refusal: Refusal | None = None
    gathered: list[Broadcast] = dataclasses.field(default_factory=list)
    emitted: list[Node] = dataclasses.field(default_factory=list)


class Context:
    """Shared behaviour of both contexts. Subclasses say how an op is run (`run`)."""

    def __init__(self, decide: Callable[[str, str], Refusal | None] | None = None) -> None:
        """`decide(code, origin)` returns a refusal to keep a rewrite from firing."""
        self.op: Any = None
        self.origin = ""
        self.sites: dict[str, SiteRecord] = {}
        self._decide = decide
        self._steps: dict[Any, Step] = {}
        self._written: dict[Any, Node] = {}
        self._plans: dict[Any, Any] = {}

    # -- running ops ------------------------------------------------------------------------------------------

    def run(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, share: bool) -> Any:
        """Run one op on nodes; `share` allows an equal earlier call to serve."""
        raise NotImplementedError

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Emit an op. Arguments may be nodes, scalars, `Full` values or plain numbers; returns node(s)."""
        return self.run(op, _plain(args), _plain(kwargs), share=True)

    def apply(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the rule of `op` on values, as if the program had called it; used to build rules from rules."""
        outer = self.op
        self.op = op
        try:
            rule = RULES.get(op)
            if rule is None or not (rule.always or has_lazy(args) or has_lazy(tuple(kwargs.values()))):
                return self.materialized(*args, **kwargs)
            return rule.function(self, *args, **kwargs)
        finally:
            self.op = outer

    def materialized(self, *args: Any, **kwargs: Any) -> Any:
        """The safe default: write every lazy argument to memory and run the op as the original does."""
        uniform = is_uniform(self.op, args, kwargs)
        written = [self.written(arg) for arg in args]
        named = {key: self.written(arg) for key, arg in kwargs.items()}
        return self.wrap(self.run(self.op, _plain(written), _plain(named), share=False), uniform)

    def wrap(self, result: Any, uniform: bool = False) -> Any:
        """Turn the node(s) an op returned into values."""
        if isinstance(result, (list, tuple)):
            return [self.wrap(item, uniform) for item in result]
        value = val(result)
        if isinstance(value, torch.Tensor):
            return Uniform(result) if uniform else Full(result)
        return Scalar(result) if isinstance(result, fx.Node) else result

    # -- materializing ----------------------------------------------------------------------------------------

    def written(self, arg: Any) -> Any:
        """An argument with every lazy value inside it written to memory."""
        if is_tensor(arg):
            return self.materialize(arg)
        if isinstance(arg, (list, tuple)):
            return [self.written(item) for item in arg]
        return arg

    def materialize(self, value: Value) -> Node:
        """The node of the full tensor; written once a value, always right, recorded at the current op."""
        if isinstance(value, Full):
            return value.node
        for part in broadcasts_in(value):
            self._record(part, gathered=True)
        if value not in self._written:
            self._written[value] = self._write(value)
        return self._written[value]

    def _write(self, value: Value) -> Node:
        match value:
            case Broadcast():
                return self.lift(value.node, value.map.steps, value.dim, value.mult)
            case Concat(parts=parts, dim=dim):
                return self.call(aten.cat.default, [self.materialize(part) for part in parts], dim)
            case Sum(terms=terms, dtype=dtype):
                shape = value.shape
                nodes = [self.operand(term, shape) for term in terms]
                total = nodes[0]
                for node in nodes[1:]:
                    total = self.call(aten.add.Tensor, total, node)
                total = self.cast(total, dtype)
                for term in terms:
                    if isinstance(term, Broadcast) and term.map.is_expand:
                        axis = len(shape) - len(term.shape) + term.dim
                        if shape_of(total)[axis] != shape[axis]:  # no other term repeated the row
                            sizes = [-1] * len(shape)
                            sizes[axis] = self.rows(term.map)
                            total = self.call(aten.expand.default, total, sizes)
                return total
            case _:
                raise AssertionError(f"cannot materialize {value!r}")

    def operand(self, value: Value, shape: Sequence[int]) -> Node:
        """A node that broadcasts to `shape`: an expanded row stays one row where broadcasting repeats it anyway."""
        if isinstance(value, Broadcast) and value.map.is_expand and value.mult == 1:
            self._record(value, gathered=False)
            return value.node
        return self.materialize(value)

    def lift(self, node: Node, steps: Sequence[Step], dim: int, mult: int = 1) -> Node:
        """Take a compact tensor down some steps of its map."""
        for step in steps:
            node = self._step(node, step, dim, mult)
        return node

    def _step(self, node: Node, step: Step, dim: int, mult: int) -> Node:
        if mult != 1:
            wide = self.split_rows(node, dim, mult)
            return self.call(aten.flatten.using_ints, self._step(wide, step, dim, 1), dim, dim + 1)
        ndim = len(shape_of(node))
        match step:
            case Gather(index=index, wraps=True):
                return self.call(aten.index.Tensor, node, [None] * dim + [index])
            case Gather(index=index):
                return self.call(aten.index_select.default, node, dim, index)
            case Expand(size=size):
                return self.call(aten.expand.default, node, [size if d == dim else -1 for d in range(ndim)])
            case Repeat(times=times):
                return self.call(aten.repeat_interleave.self_int, node, times, dim)
            case Tile(times=times):
                return self.call(aten.repeat.default, node, [times if d == dim else 1 for d in range(ndim)])

    def split_rows(self, node: Node, dim: int, mult: int) -> Node:
        """View `[.., rows * mult, ..]` as `[.., rows, mult, ..]`."""
        rows = self.call(operator.floordiv, self.size(node, dim), mult)
        return self.call(aten.unflatten.int, node, dim, [rows, mult])

    def size(self, node: Node, dim: int) -> Any:
        """The size of a node's axis, as a number or a scalar node."""
        return self.call(aten.sym_size.int, node, dim)

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """The node in another dtype (itself if it has it)."""
        return node if val(node).dtype == dtype else self.call(aten.to.dtype, node, dtype)

    def rows(self, map: Map) -> Any:
        """Number of expanded rows of a map, as a number or a scalar node."""
        match map.steps[-1]:
            case Gather(index=index):
                return self.size(index, 0)
            case Expand(size=size):
                return size
            case Repeat(times=times, rows=rows) | Tile(times=times, rows=rows):
                source = self._source_rows.get(map.steps[-1])
                return rows if source is None else self.call(operator.mul, source, times)
        raise AssertionError(map)

    @property
    def _source_rows(self) -> dict[Any, Any]:
        return self._plans.setdefault("source rows", {})  # type: ignore[no-any-return]

    # -- steps: one object a meaning, so that maps compare by identity -------------------------------------------

    def gather_step(self, index: Node, *, wraps: bool = False) -> Gather:
        """The step that reads rows through an index `[rows]`."""
        key = ("gather", index if isinstance(index, fx.Node) else id(index))
        step = self._steps.setdefault(key, Gather(index, shape_of(index)[0], wraps))
        assert isinstance(step, Gather)
        return step

    def expand_step(self, size: Any, rows: int) -> Expand:
        """The step that repeats one row `rows` times."""
        step = self._steps.setdefault(("expand", rows), Expand(size, rows))
        assert isinstance(step, Expand)
        return step

    def repeat_step(self, times: Any, rows: int, source_rows: Any) -> Repeat:
        """The step that repeats every row `times` times in place."""
        step = self._steps.setdefault(("repeat", hint(times), rows), Repeat(times, rows))
        self._source_rows.setdefault(step, source_rows)
        assert isinstance(step, Repeat)
        return step

    def tile_step(self, times: Any, rows: int, source_rows: Any) -> Tile:
        """The step that repeats the whole tensor `times` times."""
        step = self._steps.setdefault(("tile", hint(times), rows), Tile(times, rows))
        self._source_rows.setdefault(step, source_rows)
        assert isinstance(step, Tile)
        return step

    def plan(self, key: Any, build: Callable[[], Any]) -> Any:
        """Something computed once a request and shared by every layer (the grouping of candidates)."""
        if key not in self._plans:
            self._plans[key] = build()
        return self._plans[key]

    def is_dynamic(self, size: int) -> bool:
        """Whether a (hint) size depends on a dynamic dimension of the program."""
        return False

    def is_dynamic_rows(self, size: int) -> bool:
        """Whether an index of this length can be a per-row index, not a fixed choice of columns."""
        return True

    def output_size(self, dim: int) -> int:
        """Size of an axis of the current op's result in the original program (data-dependent sizes)."""
        raise NotImplementedError

    def call_sized(self, op: Any, shape: tuple[int, ...], dtype: torch.dtype, *args: Any, **kwargs: Any) -> Node:
        """`call` for an op whose result size depends on data: the caller knows its (hint) shape."""
        return self.call(op, *args, **kwargs)

    def is_constant(self, value: Value) -> bool:
        """Whether a value comes from parameters or constants, so that repeating it is no user-side work."""
        return isinstance(value, Uniform)

    # -- sites ------------------------------------------------------------------------------------------------

    def allow(self, code: str, *values: Value, optional: bool = True) -> bool:
        """Whether the rewrite `code` may fire at the current op for these values; the answer is recorded.

        A late gather is not `optional`: what ran compact before it has no other form.
        """
        refusal = self._decide(code, self.origin) if self._decide and optional else None
        inputs = [b for b in broadcasts_in(list(values)) if b.source]
        if not inputs:
            return refusal is None
        site = self._site(inputs)
        if refusal is None:
            site.code = site.code or code
        elif site.code is None:
            site.refusal = dataclasses.replace(refusal, declined=True)
        return refusal is None

    def refuse(self, reason: str) -> None:
        """Say why the current op gets no better form than materializing."""
        site = self.sites.get(self.origin)
        if site is None:
            site = self.sites.setdefault(self.origin, SiteRecord(self.origin, str(self.op), []))
        if site.refusal is None:
            site.refusal = Refusal(reason)

    def _site(self, inputs: Sequence[Broadcast]) -> SiteRecord:
        site = self.sites.setdefault(self.origin, SiteRecord(self.origin, str(self.op), []))
        site.inputs.extend(b for b in inputs if b not in site.inputs)
        return site

    def _record(self, value: Broadcast, *, gathered: bool) -> None:
        if value.source:
            site = self._site([value])
            if gathered and value not in site.gathered:
                site.gathered.append(value)


class EagerContext(Context):
    """Runs every op on real tensors at once; what the rule tests use."""

    def run(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, share: bool) -> Any:
        """Run the op."""
        return op(*args, **kwargs)


def has_lazy(args: Any) -> bool:
    """Whether any argument is a value that has not been written to memory."""
    if isinstance(args, (list, tuple)):
        return any(has_lazy(arg) for arg in args)
    return isinstance(args, (Broadcast, Concat, Sum))


def is_uniform(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op computes from parameters, constants and fixed numbers alone, and always the same."""
    if torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()):
        return False

    def plain(arg: Any) -> bool:
        if isinstance(arg, (list, tuple)):
            return all(plain(item) for item in arg)
        return isinstance(arg, Uniform) or not (is_tensor(arg) or isinstance(arg, (Scalar, fx.Node)))

    return plain(list(args)) and plain(list(kwargs.values()))


def _plain(args: Any) -> Any:
    """Arguments as the op takes them: values and scalars replaced by their nodes."""
    if isinstance(args, (Full, Scalar)):
        return args.node
    if isinstance(args, Mapping):
        return {key: _plain(arg) for key, arg in args.items()}
    if isinstance(args, (list, tuple)):
        return [_plain(arg) for arg in args]
    return args


__all__ = ["Context", "EagerContext", "Refusal", "SiteRecord", "has_broadcast"]
