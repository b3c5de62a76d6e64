"""One walk over a program: every tensor becomes a value, every op goes through its rule, a new graph comes out.

Sizes are concrete during the walk. Each dynamic dimension of the program, and each new one, gets its own large prime
(a *hint size*), so that an axis shows by its number alone which dimension it holds, and equal numbers mean equal
sizes; no guard is added to the user's program. The new graph itself computes sizes from its inputs.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from ikbo_cli.broadcast import aliasing
from ikbo_cli.broadcast.context import Context, Refusal, SiteRecord, has_lazy
from ikbo_cli.broadcast.maps import Map
from ikbo_cli.broadcast.registry import RULES, functional_form, load_rules
from ikbo_cli.broadcast.rules.outputs import user_output
from ikbo_cli.broadcast.values import Broadcast, Full, Node, Scalar, Uniform, val
from ikbo_cli.errors import UnsupportedProgram

aten = torch.ops.aten

INDEX_NAME = "cand_to_user_index"
FIRST_HINT = 5003

_UNKNOWN_SIZE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)

_KEPT_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn")
_READS_STRIDES = (aten.as_strided.default, aten.view.dtype)
_DROPPED = (aten._assert_tensor_metadata.default,)


@dataclasses.dataclass(frozen=True)
class Declared:
    """What the caller declares of the program's inputs.

    Attributes:
        user_inputs: Names of placeholders that repeat user rows along axis 0 (form F3).
        index: Name of an existing placeholder that is the index, or None to add one.
        index_dtype: dtype of an added index.
        exploit: False gathers every declared input at once: the same signature, nothing rewritten.
    """

    user_inputs: frozenset[str] = frozenset()
    index: str | None = None
    index_dtype: torch.dtype = torch.int64
    exploit: bool = True


@dataclasses.dataclass(frozen=True)
class NewInput:
    """A tensor input of the new graph: its node, and the original placeholder it stands for (None: the index)."""

    node: fx.Node
    original: str | None
    compact: bool


@dataclasses.dataclass
class Walk:
    """The outcome of a walk.

    Attributes:
        graph: The new graph; its nodes carry `meta["ikbo_origin"]`, the original node they come from.
        inputs: Inputs of the new graph in flat order.
        sites: What happened at each op that reads expanded user values, in graph order.
        unknown_ops: Ops without a rule that received repeated rows, with their count.
        user_side: Original nodes whose result was computed on compact rows.
        outputs_compact: Whether each output was still compact when it was returned.
        hints: Hint size of every dynamic dimension, by symbol name; "U" and "B" for those the walk added.
        rounded_partials: True when a partial sum had to be rounded to 16 bits.
    """

    graph: fx.Graph
    inputs: list[NewInput]
    sites: list[SiteRecord]
    unknown_ops: dict[str, int]
    user_side: set[str]
    outputs_compact: list[bool]
    hints: dict[str, int]
    rounded_partials: bool


class GraphContext(Context):
    """Emits ops into a new graph, and knows every result's shape by running it on fake tensors."""

    def __init__(
        self, root: torch.nn.Module, hints: Hints, decide: Callable[[str, str], Refusal | None] | None
    ) -> None:
        """An empty graph over the modules of `root`."""
        super().__init__(decide)
        self.graph = fx.Graph()
        self.root = root
        self.hints = hints
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.current: fx.Node | None = None
        self._shared: dict[Any, Any] = {}

    def run(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, share: bool) -> Any:
        """Emit one op, unless an equal one was emitted before and may serve."""
        key = _key(op, args, kwargs) if share else None
        if key is not None and key in self._shared:
            return self._shared[key]
        node = self.graph.call_function(op, tuple(_tuples(args)), dict(kwargs))
        with self.mode:
            try:
                fake = op(*fx.map_arg(list(args), val), **fx.map_arg(dict(kwargs), val))
            except _UNKNOWN_SIZE:
                fake = self._fallback(op)
        result = self._finish(node, fake)
        if key is not None:
            self._shared[key] = result
        return result

    def call_sized(self, op: Any, shape: tuple[int, ...], dtype: torch.dtype, *args: Any, **kwargs: Any) -> Node:
        """Emit an op whose result size depends on data."""
        plain = [a.node if isinstance(a, (Full, Scalar)) else a for a in args]
        named = {k: v.node if isinstance(v, (Full, Scalar)) else v for k, v in kwargs.items() if v is not None}
        node = self.graph.call_function(op, tuple(plain), named)
        with self.mode:
            fake = torch.empty(shape, dtype=dtype, device=val(plain[0]).device)
        return self._finish(node, fake)

    def output_size(self, dim: int) -> int:
        """Size of an axis of the current original node."""
        assert self.current is not None
        return self.hints.evaluate(self.current.meta["val"].shape[dim])

    def is_dynamic(self, size: int) -> bool:
        """Whether a size is (a multiple of) a hint."""
        return self.hints.is_dynamic(size)

    def is_dynamic_rows(self, size: int) -> bool:
        """An index of fixed length chooses columns; one of dynamic length reads rows."""
        return self.hints.is_dynamic(size)

    def placeholder(self, name: str, fake: Any) -> fx.Node:
        """A new input."""
        node = self.graph.placeholder(name)
        node.meta["val"] = fake
        return node

    def _fallback(self, op: Any) -> Any:
        """The result of a data-dependent op, from the shapes that export recorded for it."""
        if self.current is None or self.current.target is not op:
            raise
        return self.hints.fake(self.current.meta["val"])

    def _finish(self, node: fx.Node, fake: Any) -> Any:
        node.meta["val"] = fake
        if self.current is not None:
            node.meta["ikbo_origin"] = self.current.name
            for key in _KEPT_META:
                if key in self.current.meta:
                    node.meta[key] = self.current.meta[key]
        if isinstance(fake, (list, tuple)):
            parts = []
            for position, item in enumerate(fake):
                part = self.graph.call_function(operator.getitem, (node, position))
                parts.append(self._finish(part, item))
            return parts
        return node


class Hints:
    """Hint sizes: one prime for every dynamic dimension."""

    def __init__(self, taken: set[int]) -> None:
        """`taken`: fixed sizes of the program, which no hint may divide."""
        self.values: dict[Any, int] = {}
        self.names: dict[str, int] = {}
        self._taken = taken
        self._next = FIRST_HINT

    def prime(self, limit: int | None = None) -> int:
        """A prime not used before, at most `limit`, dividing no fixed size of the program."""
        candidate = self._next if limit is None or limit > self._next else max(2, limit)
        while True:
            candidate = sympy.nextprime(candidate) if limit is None or limit > self._next else candidate
            used = candidate in self.values.values() or candidate in self.names.values()
            if not used and not any(size % candidate == 0 for size in self._taken if size):
                break
            if limit is not None and limit <= self._next:
                candidate = sympy.prevprime(candidate)
        if limit is None or limit > self._next:
            self._next = candidate
        return int(candidate)

    def add(self, name: str) -> int:
        """The hint of a dimension that the walk adds."""
        self.names[name] = self.prime()
        return self.names[name]

    def evaluate(self, size: Any) -> int:
        """The concrete value of a symbolic size."""
        if isinstance(size, int):
            return size
        expression = size.node.expr if hasattr(size, "node") else size
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self.values:
                self.values[symbol] = self.prime(self._limit(size, symbol))
        return int(expression.subs(self.values))

    def is_dynamic(self, size: int) -> bool:
        """Whether a concrete size contains a hint."""
        return size != 0 and any(size % h == 0 for h in (*self.values.values(), *self.names.values()))

    def fake(self, value: Any) -> Any:
        """A fake tensor (or number) with concrete sizes like a symbolic one; the fake mode must be active."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.fake(item) for item in value)
        if isinstance(value, torch.Tensor):
            shape = [self.evaluate(s) for s in value.shape]
            return torch.empty(shape, dtype=value.dtype, device=value.device)
        if isinstance(value, torch.SymInt):
            return self.evaluate(value)
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            return float(value.node.expr.subs(self.values)) if isinstance(value, torch.SymFloat) else True
        return value

    @staticmethod
    def _limit(size: Any, symbol: Any) -> int | None:
        """The upper bound that export declares for a symbol."""
        env = getattr(getattr(size, "node", None), "shape_env", None)
        bounds = env.var_to_range.get(symbol) if env is not None else None
        if bounds is None:
            return None
        upper = bounds.upper
        return int(upper) if upper.is_Integer and int(upper) < 2**31 else None


def walk(
    module: fx.GraphModule,
    declared: Declared | None = None,
    decide: Callable[[str, str], Refusal | None] | None = None,
) -> Walk:
    """Walk a program and emit the rewritten one.

    Args:
        module: The unlifted program; every node has `meta["val"]`.
        declared: Which inputs are user-side, and where the index comes from.
        decide: `decide(code, origin)` returns a refusal to keep a rewrite from firing at a node.

    Raises:
        UnsupportedProgram: A construct that cannot be carried over, naming the node.
    """
    load_rules()
    return _Walker(module, declared or Declared(), decide).walk()


class _Walker:
    def __init__(
        self, module: fx.GraphModule, declared: Declared, decide: Callable[[str, str], Refusal | None] | None
    ) -> None:
        self.module = module
        self.declared = declared
        self.hints = Hints(_fixed_sizes(module.graph))
        self.ctx = GraphContext(module, self.hints, decide)
        self.env: dict[fx.Node, Any] = {}
        self.inputs: list[NewInput] = []
        self.unknown: dict[str, int] = {}
        self.user_side: set[str] = set()
        self.outputs_compact: list[bool] = []
        self.index_node: fx.Node | None = None

    def walk(self) -> Walk:
        graph = self.module.graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        with self.ctx.mode:
            self._inputs(placeholders)
        pinned = aliasing.pinned_nodes(graph)
        for node in graph.nodes:
            self.ctx.current, self.ctx.origin = node, node.name
            if node.op == "get_attr":
                self.env[node] = self._attribute(node)
            elif node.op == "call_function":
                self._call(node, verbatim=node in pinned)
            elif node.op == "output":
                self._output(node)
            elif node.op != "placeholder":
                raise UnsupportedProgram(f"cannot read a {node.op} node ({node.target})", node=node.name)
        self.ctx.graph.eliminate_dead_code()
        self.ctx.graph.lint()
        order = {node.name: position for position, node in enumerate(graph.nodes)}
        for site in self.ctx.sites.values():
            if site.code is None and site.refusal is None:
                site.refusal = Refusal(f"{site.op} needs the rows of both sides together; no better form is known")
        sites = sorted(self.ctx.sites.values(), key=lambda site: order[site.origin])
        self._attribute_emitted()
        return Walk(
            self.ctx.graph,
            self.inputs,
            [site for site in sites if site.inputs],
            self.unknown,
            self.user_side,
            self.outputs_compact,
            {**{str(k): v for k, v in self.hints.values.items()}, **self.hints.names},
            self._rounded(),
        )

    def _inputs(self, placeholders: Sequence[fx.Node]) -> None:
        nodes: dict[fx.Node, fx.Node] = {}
        users = self.hints.add("U") if self.declared.user_inputs else 0
        for old in placeholders:
            fake = self.hints.fake(old.meta.get("val"))
            compact = old.name in self.declared.user_inputs
            if compact:
                fake = torch.empty((users, *fake.shape[1:]), dtype=fake.dtype, device=fake.device)
            nodes[old] = self.ctx.placeholder(old.name, fake)
            self.inputs.append(NewInput(nodes[old], old.name, compact))
            self.env[old] = Full(nodes[old]) if isinstance(fake, torch.Tensor) else _number(nodes[old], fake)
            if old.name == self.declared.index:
                self.index_node = nodes[old]
        if not self.declared.user_inputs:
            return
        declared = [old for old in placeholders if old.name in self.declared.user_inputs]
        batch = self._batch(declared)
        if self.index_node is None:
            taken = {old.name for old in placeholders}
            name = INDEX_NAME
            while name in taken:
                name += "_1"
            device = val(nodes[declared[0]]).device
            fake = torch.empty(batch, dtype=self.declared.index_dtype, device=device)
            self.index_node = self.ctx.placeholder(name, fake)
            self.inputs.append(NewInput(self.index_node, None, False))
        step = self.ctx.gather_step(self.index_node)
        for old in declared:
            value = Broadcast(nodes[old], Map((step,)), 0, source=old.name)
            self.env[old] = value if self.declared.exploit else Full(self.ctx.lift(nodes[old], value.map.steps, 0))

    def _batch(self, declared: Sequence[fx.Node]) -> int:
        """The hint of the batch dimension that all declared inputs share."""
        sizes = [old.meta["val"].shape[0] if old.meta["val"].dim() else None for old in declared]
        for old, size in zip(declared, sizes, strict=True):
            if size is None or isinstance(size, int):
                raise UnsupportedProgram(
                    f"input {old.name!r} has no dynamic candidate axis (axis 0 is {size})",
                    hint="export again with the batch dynamic: "
                    'dynamic_shapes={"' + old.name + '": {0: torch.export.Dim("B")}, ...}',
                    node=old.name,
                )
        rows = {self.hints.evaluate(size) for size in sizes}
        if len(rows) != 1:
            raise UnsupportedProgram("the declared user inputs do not share one batch dimension")
        return rows.pop()

    def _attribute(self, node: fx.Node) -> Any:
        new = self.ctx.graph.get_attr(str(node.target))
        new.meta = {key: value for key, value in node.meta.items() if key != "from_node"}
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return new
        with self.ctx.mode:
            new.meta["val"] = torch.empty_strided(
                tuple(value.shape), value.stride(), dtype=value.dtype, device=value.device
            )
        return Uniform(new)

    def _call(self, node: fx.Node, *, verbatim: bool) -> None:
        ctx, target = self.ctx, node.target
        if target in _DROPPED:
            return
        args, kwargs = self._map(node.args), self._map(node.kwargs)
        if target is operator.getitem and isinstance(args[0], list):
            self.env[node] = args[0][args[1]]
            return
        if isinstance(target, HigherOrderOperator):
            raise UnsupportedProgram(f"higher-order operator {target} is not supported", node=node.name)
        ctx.op = target
        soft = None if verbatim else functional_form(target)
        changed = aliasing.mutated(node)
        if soft is not None and changed is not None:
            ctx.op = soft
            self.env[node] = self.env[changed] = self._rule(node, args, kwargs)
            return
        if verbatim or changed is not None:
            self.env[node] = ctx.materialized(*args, **kwargs)
            return
        if target is aten.view.default:
            # Tensors of the new graph may be laid out differently; a reshape is a view wherever a view is possible.
            ctx.op = aten.reshape.default
        if target in _READS_STRIDES:
            args = [self._laid_out_as_before(node, args[0]), *args[1:]]
        self.env[node] = self._rule(node, args, kwargs)

    def _laid_out_as_before(self, node: fx.Node, value: Any) -> Any:
        """For ops that read memory by stride: the same layout as in the original, or a refusal."""
        written = self.ctx.materialize(value)
        before = node.args[0].meta["val"]  # type: ignore[union-attr]
        if not before.is_contiguous():
            if value is not written and not isinstance(value, Full):
                raise UnsupportedProgram(f"{node.target} reads memory that the rewrite lays out anew", node=node.name)
            return value
        return Full(self.ctx.call(aten.clone.default, written, memory_format=torch.contiguous_format))

    def _rule(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        ctx = self.ctx
        rule = RULES.get(ctx.op)
        lazy = has_lazy(list(args)) or has_lazy(list(kwargs.values()))
        if rule is None or not (rule.always or lazy):
            if lazy and isinstance(ctx.op, OpOverload):
                self.unknown[str(ctx.op)] = self.unknown.get(str(ctx.op), 0) + 1
                ctx.refuse(f"no rule for {ctx.op}")
            return ctx.materialized(*args, **kwargs)
        result = rule.function(ctx, *args, **kwargs)
        first = result[0] if isinstance(result, list) and result else result
        if isinstance(first, Broadcast) and first.source and lazy:
            self.user_side.add(node.name)
        return result

    def _output(self, node: fx.Node) -> None:
        results = []
        for item in node.args[0]:  # type: ignore[union-attr]
            value = self.env[item] if isinstance(item, fx.Node) else item
            self.outputs_compact.append(isinstance(value, Broadcast) and bool(value.source))
            if isinstance(value, Broadcast):
                self.ctx.op = "output"
                if value.moved:
                    value = Full(user_output(self.ctx, value))
                else:
                    self.ctx.refuse("an input's rows are returned as they are")
            value = self.ctx.written(value)
            results.append(value.node if isinstance(value, (Full, Scalar)) else value)
        new = self.ctx.graph.output(tuple(results))
        new.meta["val"] = tuple(val(r) for r in results)

    def _map(self, args: Any) -> Any:
        if isinstance(args, fx.Node):
            return self.env[args]
        if isinstance(args, (list, tuple)):
            return [self._map(item) for item in args]
        if isinstance(args, dict):
            return {key: self._map(item) for key, item in args.items()}
        return args

    def _attribute_emitted(self) -> None:
        for node in self.ctx.graph.nodes:
            site = self.ctx.sites.get(node.meta.get("ikbo_origin", ""))
            if site is not None:
                site.emitted.append(node)

    def _rounded(self) -> bool:
        wide = (torch.float16, torch.bfloat16)
        dtypes = {n.meta["val"].dtype for n in self.ctx.graph.nodes if isinstance(n.meta.get("val"), FakeTensor)}
        split = any(site.code in ("IKB101", "IKB102", "IKB108") for site in self.ctx.sites.values())
        return split and any(dtype in wide for dtype in dtypes)


def _number(node: fx.Node, fake: Any) -> Any:
    return Scalar(node) if isinstance(fake, (int, float, bool)) else node


def _fixed_sizes(graph: fx.Graph) -> set[int]:
    sizes: set[int] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            sizes.update(size for size in value.shape if isinstance(size, int))
    return sizes


def _tuples(args: Sequence[Any]) -> list[Any]:
    return [list(arg) if isinstance(arg, (list, tuple)) else arg for arg in args]


def _key(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if isinstance(op, OpOverload) and (op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags):
        return None

    def freeze(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return tuple(freeze(item) for item in arg)
        return (type(arg), arg)

    try:
        key = (op, freeze(list(args)), tuple(sorted((k, freeze(v)) for k, v in kwargs.items())))
        hash(key)
    except TypeError:
        return None
    return key
