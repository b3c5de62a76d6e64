"""Which dynamic sizes are candidates and which are users, and what they are in a ratio case."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ikbo_cli.verify.cases import RatioCase
from ikbo_cli.verify.graphs import GATHERS, MOVES
from ikbo_cli.verify.pairing import Pairing

aten = torch.ops.aten

LENGTH = 20
"""Size of a dynamic dimension that is neither candidates nor users, where its bounds allow it."""
VALUES_A_BAG = 3

_EXPANSIONS = {
    aten.expand.default, aten.expand_as.default, aten.broadcast_to.default, aten.repeat.default, aten.tile.default,
    aten.repeat_interleave.self_int,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a program's sizes follow from a ratio case.

    Attributes:
        form: `gather` (an index input), `repeats` (an input of counts), `compact` (declared inputs), `single-user`,
            `expand` (user rows are repeated equally often), or `plain` (no user rows were found).
        indexes: Index inputs, and the size that each reads rows of.
        roles: What each symbol of the inputs is: `batch`, `users`, `middle` (between two levels), `each` (candidates
            a user), `bag` or `length`.
        fixed_batch: The number of candidates, where the program fixes it.
        fixed_users: The number of users, where it does.
        fixed_each: Candidates a user, where it does (form `expand`).
        ranges: Bounds of every symbol.
    """

    form: str
    indexes: Mapping[str, Any]
    roles: Mapping[str, str]
    fixed_batch: int | None
    fixed_users: int | None
    fixed_each: int | None
    ranges: Mapping[str, tuple[int, int | None]]

    def fit(self, case: RatioCase) -> RatioCase | None:
        """The case at the sizes that the program allows, or None if its form cannot express it."""
        wanted = self._fit(case)
        return wanted if wanted is not None and self.sizes(wanted) is not None else None

    def _fit(self, case: RatioCase) -> RatioCase | None:
        if self.form == "plain":
            batch = case.batch if self.fixed_batch is None else self.fixed_batch
            return dataclasses.replace(case, batch=batch) if case.name == "even" else None
        if self.form == "single-user":
            return dataclasses.replace(case, batch=self.fixed_batch or case.batch) if case.name == "U=1" else None
        if self.form == "expand":
            return self._equal(case)
        if self.form == "repeats" and case.name == "unsorted index":
            return None
        batch = case.batch if self.fixed_batch is None else self.fixed_batch
        users = batch if case.name == "U=B" else case.users
        if self.fixed_users is not None:
            if case.name in ("U=1", "U=B") and users != self.fixed_users:
                return None
            users = self.fixed_users
        if case.name == "users without candidates" and users < 2:
            return None
        if case.name == "odd counts" and (batch % 2 == 0 or users % 2 == 0):
            return None
        return dataclasses.replace(case, batch=batch, users=users)

    def _equal(self, case: RatioCase) -> RatioCase | None:
        """Every user has equally many candidates: only even spreads exist."""
        if case.name not in ("even", "U=1", "U=B", "odd counts"):
            return None
        users = self.fixed_users or case.users
        each = self.fixed_each or max(1, (self.fixed_batch or case.batch) // users)
        if case.name == "odd counts" and self.fixed_each is None:
            each += 1 - each % 2
        if (
            (case.name == "U=1" and users != 1)
            or (case.name == "U=B" and each != 1)
            or (case.name == "odd counts" and users * each % 2 == 0)
            or (self.fixed_batch is not None and users * each != self.fixed_batch)
        ):
            return None
        return dataclasses.replace(case, batch=users * each, users=users, kind="even")

    def sizes(self, case: RatioCase) -> dict[str, int] | None:
        """A number for every symbol of the inputs, or None where its bounds forbid the case."""
        numbers = {
            "batch": case.batch,
            "users": case.users,
            "middle": max(1, round((case.batch * case.users) ** 0.5)),
            "each": max(1, case.batch // max(case.users, 1)),
            "bag": VALUES_A_BAG * case.batch,
        }
        sizes: dict[str, int] = {}
        for position, (symbol, role) in enumerate(self.roles.items()):
            low, high = self.ranges[symbol]
            if role in numbers:
                wanted = numbers[role]
                if wanted < low or (high is not None and wanted > high):
                    return None
            else:
                # Lengths differ from each other, so that none passes for another.
                wanted = max(low, LENGTH + position) if high is None else max(low, min(LENGTH + position, high))
            sizes[symbol] = wanted
        return sizes


def evaluate(size: Any, sizes: Mapping[str, int]) -> int:
    """A symbolic size with numbers for its symbols.

    Raises:
        KeyError: one of its symbols is not an input's.
    """
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs({s: sizes[str(s)] for s in expression.free_symbols}))


def layout_of(module: fx.GraphModule, pairing: Pairing) -> Layout:
    """Read the layout off a program (without nested graphs), and off what its inputs pair with."""
    inputs = [n for n in module.graph.nodes if n.op == "placeholder" and isinstance(n.meta.get("val"), torch.Tensor)]
    ranges, derived = _ranges(inputs), _derived(module.graph)
    first_sizes = [n.meta["val"].shape[0] for n in inputs if n.meta["val"].dim()]
    compact = [n.meta["val"].shape[0] for n in inputs if n.name in pairing.compact_originals]
    indexes = {} if compact else _indexes(module.graph, inputs, derived)
    each: list[Any] = []
    if compact:
        form, batch, users = ("single-user" if pairing.single_user else "compact"), compact, []
    elif indexes:
        lengths, limits = [n.meta["val"].shape[0] for n in inputs if n.name in indexes], list(indexes.values())
        form, batch, users = "gather", _without(lengths, limits), _without(limits, lengths)
    elif counts := _counts(module.graph):
        form, users = "repeats", [size for _, size in counts]
        known = [size for size, _ in counts if _symbols(size) <= set(ranges)]
        batch = known or [size for size in first_sizes if _symbols(size) - _all_symbols(users)]
    else:
        batch, users, each = _expanded(module.graph, derived)
        form = "expand" if users else "plain"
        batch = batch or ([] if users else first_sizes)
    roles = dict.fromkeys(ranges, "length")
    named = {"bag": _bags(module.graph), "middle": list(indexes.values()), "users": users, "each": each, "batch": batch}
    for role, sizes in named.items():
        roles.update(dict.fromkeys(_all_symbols(sizes) & set(roles), role))
    if form == "expand" and not batch:
        # Candidates that have rows of their own in a size of their own.
        own = [size for size in first_sizes if all(roles[s] == "length" for s in _symbols(size))]
        roles.update(dict.fromkeys(_all_symbols(own), "batch"))
    return Layout(form, indexes, roles, _fixed(batch), _fixed(users), _fixed(each), ranges)


def _without(sizes: list[Any], others: list[Any]) -> list[Any]:
    """Sizes that no other is; all where none is left."""
    return [size for size in sizes if str(size) not in {str(o) for o in others}] or sizes


def _fixed(sizes: list[Any]) -> int | None:
    """The one number that the program allows, if it does."""
    numbers = {size for size in sizes if isinstance(size, int)}
    return numbers.pop() if len(numbers) == 1 and not _all_symbols(sizes) else None


def _indexes(graph: fx.Graph, inputs: list[fx.Node], derived: set[fx.Node]) -> dict[str, Any]:
    """One-dimensional integer inputs that read rows of what other inputs hold, with the size they read rows of."""
    rows = {str(n.meta["val"].shape[0]) for n in inputs if n.meta["val"].dim()}
    found: dict[str, Any] = {}
    for node in graph.nodes:
        source, positions, axis = _row_read(node)
        if source is None or source not in derived:
            continue
        size = source.meta["val"].shape[axis]
        root = _root(positions)
        value: Any = root.meta.get("val")
        if root.op != "placeholder" or axis != 0 or str(size) not in rows:
            continue
        if value.dim() == 1 and value.dtype in (torch.int32, torch.int64):
            found[root.name] = size
    return found


def _row_read(node: fx.Node) -> tuple[fx.Node | None, Any, int]:
    """What an op reads rows of, the node that holds the positions, and the axis."""
    target, args = node.target, node.args
    if target is aten.embedding.default:
        return args[0], args[1], 0  # type: ignore[return-value]
    if target in (aten.index_select.default, aten.gather.default, aten.take_along_dim.default):
        return args[0], args[2], args[1] % args[0].meta["val"].dim()  # type: ignore[return-value, union-attr, operator]
    if target is aten.index.Tensor:
        picks = [(axis, p) for axis, p in enumerate(args[1]) if p is not None]  # type: ignore[arg-type]
        if len(picks) == 1:
            return args[0], picks[0][1], picks[0][0]  # type: ignore[return-value]
    return None, None, 0


def _root(node: fx.Node) -> fx.Node:
    """Where a node's values come from, if they were only moved."""
    while node.op == "call_function" and node.target in MOVES - GATHERS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _derived(graph: fx.Graph) -> set[fx.Node]:
    """Tensors that depend on an input."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), torch.SymInt):
            continue
        if node.op == "placeholder" or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _counts(graph: fx.Graph) -> list[tuple[Any, Any]]:
    """Where an input says how often rows repeat: rows after and before."""
    found = []
    for node in graph.nodes:
        position = {aten.repeat_interleave.self_Tensor: 1, aten.repeat_interleave.Tensor: 0}.get(node.target)
        if position is not None and _root(node.args[position]).op == "placeholder":
            axis = node.args[2] if position and len(node.args) > 2 and node.args[2] is not None else 0
            found.append((node.meta["val"].shape[axis], node.args[position].meta["val"].shape[0]))
    return found


def _bags(graph: fx.Graph) -> list[Any]:
    return [
        node.args[1].meta["val"].shape[0]
        for node in graph.nodes
        if node.target in (aten.embedding_bag.default, aten.embedding_bag.padding_idx)
    ]


def _expanded(graph: fx.Graph, derived: set[fx.Node]) -> tuple[list[Any], list[Any], list[Any]]:
    """Sizes of candidates, users, and candidates a user, by the first op that repeats rows equally often."""
    for node in graph.nodes:
        if node.target not in _EXPANSIONS or node.args[0] not in derived:
            continue
        before, after = node.args[0].meta["val"].shape, node.meta["val"].shape
        if len(after) != len(before) or not before:
            continue
        grown = [axis for axis, (a, b) in enumerate(zip(before, after, strict=True)) if str(a) != str(b)]
        if len(grown) != 1:
            continue
        axis = grown[0]
        if axis == 0 and before[0] == 1 and isinstance(before[0], int):
            return [after[0]], [1], []
        if axis == 0:
            # `after = before * each`: either a number, or a size of its own.
            each = _quotient(after[0], before[0])
            return ([after[0]] if each is None else []), [before[0]], ([] if each is None else [each])
        if axis == 1 and before[1] == 1 and before[0] != 1:
            return [], [before[0]], [after[1]]
    return [], [], []


def _quotient(after: Any, before: Any) -> Any:
    """`after / before` where it is a number or one symbol."""
    if isinstance(after, int) and isinstance(before, int):
        return after // before
    if isinstance(after, int) or isinstance(before, int):
        return None
    ratio = after.node.expr / before.node.expr
    if ratio.is_Integer:
        return int(ratio)
    return None


def _symbols(size: Any) -> set[str]:
    return set() if isinstance(size, int) else {str(s) for s in size.node.expr.free_symbols}


def _all_symbols(sizes: list[Any]) -> set[str]:
    return {symbol for size in sizes for symbol in _symbols(size)}


def _ranges(inputs: list[fx.Node]) -> dict[str, tuple[int, int | None]]:
    """Bounds of every symbol of the inputs, in the order in which they appear."""
    found: dict[str, tuple[int, int | None]] = {}
    for node in inputs:
        for size in node.meta["val"].shape:
            if isinstance(size, int):
                continue
            for symbol in sorted(size.node.expr.free_symbols, key=str):
                env = size.node.shape_env
                bounds = env.var_to_range.get(symbol) if env is not None else None
                if bounds is None:
                    found.setdefault(str(symbol), (0, None))
                    continue
                low = int(bounds.lower) if bounds.lower.is_Integer else 0
                bounded = bounds.upper.is_Integer and int(bounds.upper) < 2**31
                found.setdefault(str(symbol), (low, int(bounds.upper) if bounded else None))
    return found
