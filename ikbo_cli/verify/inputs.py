"""Random inputs that are valid: ids within the tables they index, lengths within the axis they are compared with."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ikbo_cli.errors import InvalidInput
from ikbo_cli.verify.cases import RatioCase

aten = torch.ops.aten

DEFAULT_LENGTH = 20
FREE_RANGE = 10

_SAME_VALUES = {
    aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.default, aten.squeeze.dims, aten.permute.default, aten.transpose.int, aten.select.int,
    aten.slice.Tensor, aten.expand.default, aten.contiguous.default, aten.clone.default, aten.to.dtype,
    aten.cat.default,
    aten.stack.default, aten.concat.default, aten.index_select.default, aten.index.Tensor, aten.split.Tensor,
    aten.unbind.int, aten.chunk.default, aten.repeat.default, aten.repeat_interleave.self_int,
    aten.split_with_sizes.default,
    aten.expand_as.default, aten._to_copy.default, aten.gather.default, aten.masked_fill.Scalar, operator.getitem,
    aten.to.device, aten.alias.default, aten.detach.default, aten.unflatten.int, aten.flip.default, aten.where.self,
    aten.t.default, aten.type_as.default,
}  # fmt: skip
_COMPARISONS = {aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor}


@dataclasses.dataclass(frozen=True)
class CaseInputs:
    """Inputs of both programs for one draw, in flat order."""

    original: list[Any]
    optimized: list[Any]


class InputMaker:
    """Draws valid inputs for a program and its rewritten form."""

    def __init__(self, original: fx.GraphModule, optimized: fx.GraphModule, manifest: Mapping[str, Any] | None) -> None:
        """`manifest`: of the optimized file; without one, inputs pair by name."""
        self.original = original
        self.placeholders = [n for n in original.graph.nodes if n.op == "placeholder"]
        self.new_placeholders = [n for n in optimized.graph.nodes if n.op == "placeholder"]
        self.manifest = manifest
        self.pairs = self._pairs()
        self.indexes = _index_inputs(original)
        self.user_symbols, self.batch_symbols = self._symbols()

    @property
    def declared(self) -> bool:
        """Whether the optimized program has compact inputs."""
        return any(compact for _, compact in self.pairs.values())

    def applicable(self, case: RatioCase) -> bool:
        """Whether the program's form can express a case."""
        if self.declared or self.indexes:
            sizes = self._sizes(case)
            return sizes is not None
        return (case.kind == "even" and case.name == "even") or case.name in ("U=1", "U=B")

    def draw(self, case: RatioCase, seed: int) -> CaseInputs:
        """One draw of a case.

        Raises:
            InvalidInput: valid values of an input cannot be derived.
        """
        generator = torch.Generator().manual_seed(seed)
        sizes = self._sizes(case)
        if sizes is None:
            raise InvalidInput(f"the program's sizes are fixed and cannot express {case.name}")
        index = case.index(generator)
        compact: dict[str, torch.Tensor] = {}
        originals: list[Any] = []
        users = {original for _, (original, is_compact) in self._named() if is_compact}
        for node in self.placeholders:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                originals.append(_evaluate(value, sizes) if isinstance(value, torch.SymInt) else value)
                continue
            shape = [_evaluate(s, sizes) for s in value.shape]
            if node.name in self.indexes:
                rows = self._index_limit(node, sizes)
                if shape[0] == case.batch and rows == case.users:
                    originals.append(index.to(value.dtype))
                else:
                    originals.append(torch.randint(0, max(rows, 1), shape, generator=generator).to(value.dtype))
                continue
            if node.name in users:
                shape[0] = case.users
            tensor = self._random(node, shape, value.dtype, sizes, generator)
            if node.name in users:
                compact[node.name] = tensor
                tensor = tensor[index]
            originals.append(tensor)
        by_name = {n.name: v for n, v in zip(self.placeholders, originals, strict=True)}
        new: list[Any] = []
        for node in self.new_placeholders:
            original, is_compact = self.pairs[node.name]
            if original is None:
                new.append(index.to(node.meta["val"].dtype))
            else:
                new.append(compact[original] if is_compact else by_name[original])
        return CaseInputs(originals, new)

    def _named(self) -> list[tuple[str, tuple[str | None, bool]]]:
        return list(self.pairs.items())

    def _pairs(self) -> dict[str, tuple[str | None, bool]]:
        """New input -> (original input or None for the index, compact)."""
        names = {n.name for n in self.placeholders}
        if self.manifest is not None:
            listed = {i["name"]: (i["original"], bool(i["compact"])) for i in self.manifest["inputs"]}
            if set(listed) >= {n.name for n in self.new_placeholders}:
                return listed
        pairs: dict[str, tuple[str | None, bool]] = {}
        for node in self.new_placeholders:
            if node.name not in names:
                raise InvalidInput(
                    f"input {node.name!r} of the optimized program has no partner in the original",
                    hint="verify files that carry a manifest, or give both programs the same input names",
                )
            pairs[node.name] = (node.name, False)
        return pairs

    def _symbols(self) -> tuple[set[str], set[str]]:
        users: set[str] = set()
        batches: set[str] = set()
        for node in self.placeholders:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                continue
            if node.name in self.indexes:
                batches.update(_symbols(value.shape[0]))
                users.update(_symbols(self.indexes[node.name]))
        for _, (original, is_compact) in self._named():
            if is_compact:
                node = next(n for n in self.placeholders if n.name == original)
                batches.update(_symbols(node.meta["val"].shape[0]))
        if not batches and self.placeholders:
            first = next((n for n in self.placeholders if isinstance(n.meta.get("val"), torch.Tensor)), None)
            found = [s for n in self.placeholders if isinstance(n.meta.get("val"), torch.Tensor)
                     for size in n.meta["val"].shape[:1] for s in _symbols(size)]  # fmt: skip
            if first is not None and found:
                batches.add(found[-1])
        return users - batches, batches

    def _sizes(self, case: RatioCase) -> dict[str, int] | None:
        """A number for every symbol, or None where bounds forbid the case."""
        sizes: dict[str, int] = {}
        middle = {s for s in self.user_symbols if any(s in _symbols(n.meta["val"].shape[0])
                  for n in self.placeholders if n.name in self.indexes)}  # fmt: skip
        for node in self.placeholders:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                continue
            for axis, size in enumerate(value.shape):
                if isinstance(size, int):
                    continue
                for symbol in size.node.expr.free_symbols:
                    name = str(symbol)
                    if name in self.batch_symbols - self.user_symbols:
                        wanted = case.batch
                    elif name in middle:
                        wanted = max(1, round((case.batch * case.users) ** 0.5))
                    elif name in self.user_symbols:
                        wanted = case.users
                    else:
                        wanted = DEFAULT_LENGTH if axis else case.users
                    low, high = _bounds(size, symbol)
                    if (high is not None and wanted > high) or wanted < low:
                        if name in self.batch_symbols | self.user_symbols:
                            return None
                        wanted = max(low, min(wanted, high or wanted))
                    sizes[name] = wanted
        fixed = [n for n in self.placeholders if isinstance(n.meta.get("val"), torch.Tensor) and n.name in self.indexes
                 and isinstance(n.meta["val"].shape[0], int)]  # fmt: skip
        return None if any(n.meta["val"].shape[0] != case.batch for n in fixed) else sizes

    def _index_limit(self, node: fx.Node, sizes: Mapping[str, int]) -> int:
        return _evaluate(self.indexes[node.name], sizes)

    def _random(
        self,
        node: fx.Node,
        shape: Sequence[int],
        dtype: torch.dtype,
        sizes: Mapping[str, int],
        generator: torch.Generator,
    ) -> torch.Tensor:
        if dtype.is_floating_point:
            limit = _limit(node, sizes)
            if limit is not None:  # float ids: cast to integers inside
                return torch.randint(0, max(limit, 1), shape, generator=generator).to(dtype)
            return torch.randn(shape, generator=generator).to(dtype)
        if dtype == torch.bool:
            mask = torch.rand(shape, generator=generator) < 0.7
            if mask.dim() and mask.shape[-1]:
                mask[..., 0] = True
            return mask
        limit = _limit(node, sizes)
        low = 1 if _is_length(node) else 0
        high = FREE_RANGE if limit is None else max(limit, low + 1)
        return torch.randint(low, high, shape, generator=generator).to(dtype)


def _index_inputs(module: fx.GraphModule) -> dict[str, Any]:
    """One-dimensional integer inputs that read rows of other inputs' data, with the size they index."""
    derived = _derived(module.graph)
    found: dict[str, Any] = {}
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(value, torch.Tensor) or value.dtype.is_floating_point:
            continue
        for user, target, size in _reads(node):
            del user
            if target in derived and value.dim() == 1 and value.dtype in (torch.int32, torch.int64):
                found[node.name] = size
    return found


def _derived(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on an input."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _reads(node: fx.Node) -> list[tuple[fx.Node, fx.Node, Any]]:
    """Ops that use a node's values as positions: (op, what is read, how many positions it has)."""
    found = []
    for carrier in _carriers(node):
        for user in carrier.users:
            target, args = user.target, user.args
            if target in (aten.embedding.default, aten.embedding_bag.padding_idx, aten.embedding_bag.default):
                if args[1] is carrier:
                    found.append((user, args[0], args[0].meta["val"].shape[0]))  # type: ignore[union-attr]
            elif (target is aten.index_select.default and args[2] is carrier) or (
                target is aten.gather.default and args[2] is carrier
            ):
                found.append((user, args[0], args[0].meta["val"].shape[args[1]]))  # type: ignore[union-attr]
            elif target is aten.index.Tensor:
                for axis, pick in enumerate(args[1]):  # type: ignore[arg-type]
                    if pick is carrier:
                        found.append((user, args[0], args[0].meta["val"].shape[axis]))  # type: ignore[union-attr]
            elif target is aten.one_hot.default and len(args) > 1:
                found.append((user, user, args[1]))
    return found  # type: ignore[return-value]


def _carriers(node: fx.Node) -> list[fx.Node]:
    """Nodes that hold the same values as `node`, rearranged."""
    seen = [node]
    for current in seen:
        for user in current.users:
            moved = user.target in _SAME_VALUES and user not in seen
            if moved and not _is_position_of(user, current):
                seen.append(user)
    return seen


def _is_position_of(user: fx.Node, node: fx.Node) -> bool:
    """Whether `user` reads something else at the positions that `node` holds."""
    if user.target in (aten.index_select.default, aten.gather.default):
        return user.args[2] is node
    return user.target is aten.index.Tensor and user.args[0] is not node


def _limit(node: fx.Node, sizes: Mapping[str, int]) -> int | None:
    """One more than the largest valid value of an integer input; None where nothing limits it."""
    limits = [_evaluate(size, sizes) for _, _, size in _reads(node)]
    limits += [_evaluate(size, sizes) + 1 for size in _compared_lengths(node)]
    return min(limits, default=None)


def _is_length(node: fx.Node) -> bool:
    return bool(_compared_lengths(node)) and not _reads(node)


def _compared_lengths(node: fx.Node) -> list[Any]:
    """Lengths of the position ranges (`arange(L)`) that an input's values are compared with."""
    found = []
    for carrier in _carriers(node):
        for user in carrier.users:
            if user.target in _COMPARISONS:
                for other in user.all_input_nodes:
                    if other is not carrier:
                        root = other
                        while root.target in _SAME_VALUES and root.args and isinstance(root.args[0], fx.Node):
                            root = root.args[0]
                        if "arange" in str(root.target):
                            found.append(root.meta["val"].shape[0])
    return found


def _symbols(size: Any) -> set[str]:
    return set() if isinstance(size, int) else {str(s) for s in size.node.expr.free_symbols}


def _evaluate(size: Any, sizes: Mapping[str, int]) -> int:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs({s: sizes.get(str(s), DEFAULT_LENGTH) for s in expression.free_symbols}))


def _bounds(size: Any, symbol: Any) -> tuple[int, int | None]:
    env = size.node.shape_env
    bounds = env.var_to_range.get(symbol) if env is not None else None
    if bounds is None:
        return 0, None
    upper = int(bounds.upper) if bounds.upper.is_Integer and int(bounds.upper) < 2**31 else None
    return (int(bounds.lower) if bounds.lower.is_Integer else 0), upper
