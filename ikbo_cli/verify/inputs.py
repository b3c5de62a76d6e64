"""Random inputs that are valid, for a program and its rewritten form alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ikbo_cli.errors import InvalidInput
from ikbo_cli.verify.cases import RatioCase
from ikbo_cli.verify.graphs import inlined
from ikbo_cli.verify.layout import evaluate, layout_of
from ikbo_cli.verify.pairing import Pair, pair_inputs
from ikbo_cli.verify.ranges import FAR, Demand, demands

FREE_RANGE = 10
"""Values of integers that only serve as numbers: 0 to 9."""
TRUE_SHARE = 0.7


@dataclasses.dataclass(frozen=True)
class CaseInputs:
    """One draw of a case: inputs of both programs in flat order, and the index `[B]` that relates them, int64."""

    original: tuple[Any, ...]
    optimized: tuple[Any, ...]
    index: torch.Tensor


def make_inputs(
    original: fx.GraphModule,
    optimized: fx.GraphModule,
    manifest: Mapping[str, Any] | None,
    case: RatioCase,
    seed: int,
) -> CaseInputs:
    """Valid random inputs of both programs for one case.

    Raises:
        InvalidInput: the case does not fit the program, inputs do not pair, or valid values cannot be derived.
    """
    maker = InputMaker(original, optimized, manifest)
    fitted = maker.fit(case)
    if fitted is None:
        raise InvalidInput(f"the program cannot express the case {case.name!r}")
    return maker.draw(fitted, seed)


class InputMaker:
    """Draws valid inputs for a program and its rewritten form."""

    def __init__(self, original: fx.GraphModule, optimized: fx.GraphModule, manifest: Mapping[str, Any] | None) -> None:
        """`manifest`: of the optimized file; without one, inputs pair by name."""
        self.module = inlined(original)
        self.placeholders = [n for n in self.module.graph.nodes if n.op == "placeholder"]
        self.new_placeholders = [n for n in optimized.graph.nodes if n.op == "placeholder"]
        self.pairing = pair_inputs(original, optimized, manifest)
        self.layout = layout_of(self.module, self.pairing)
        self._demands: dict[tuple[tuple[str, int], ...], dict[str, Demand]] = {}

    def fit(self, case: RatioCase) -> RatioCase | None:
        """The case at sizes that the program allows, or None if its form cannot express it."""
        return self.layout.fit(case)

    def draw(self, case: RatioCase, seed: int) -> CaseInputs:
        """One draw of a fitted case.

        Raises:
            InvalidInput: valid values of an input cannot be derived.
        """
        generator = torch.Generator().manual_seed(seed)
        sizes = self.layout.sizes(case)
        assert sizes is not None, "cases are fitted before they are drawn"
        index = case.index(generator)
        valid = self._valid(case, sizes)
        by_name: dict[str, Any] = {}
        compact: dict[str, torch.Tensor] = {}
        for node in self.placeholders:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                by_name[node.name] = evaluate(value, sizes) if isinstance(value, torch.SymInt) else value
                continue
            shape = tuple(evaluate(size, sizes) for size in value.shape)
            demand = valid.get(node.name)
            if node.name in self.layout.indexes:
                by_name[node.name] = self._index(node, case, index, sizes, generator).to(value.dtype)
                continue
            drawn = self._tensor(node, shape, value.dtype, demand, case, index, generator)
            if node.name in self.pairing.compact_originals:
                rows = _with_rows(demand, case.users)
                user = self._tensor(node, (case.users, *shape[1:]), value.dtype, rows, case, index, generator)
                compact[node.name] = user
                drawn = self._joined(node.name, drawn, user[index])
            by_name[node.name] = drawn
        new = [self._new(node, by_name, compact, index) for node in self.new_placeholders]
        return CaseInputs(tuple(by_name[n.name] for n in self.placeholders), tuple(new), index)

    def _valid(self, case: RatioCase, sizes: Mapping[str, int]) -> dict[str, Demand]:
        key = (("batch", case.batch), *sizes.items())
        if key not in self._demands:
            self._demands[key] = demands(self.module, lambda size: evaluate(size, sizes), case.batch)
        return self._demands[key]

    def _index(
        self, node: fx.Node, case: RatioCase, index: torch.Tensor, sizes: Mapping[str, int], generator: torch.Generator
    ) -> torch.Tensor:
        """Row of the next coarser level for each row of this one; between levels the case's spread is drawn anew."""
        rows = evaluate(node.meta["val"].shape[0], sizes)
        limit = evaluate(self.layout.indexes[node.name], sizes)
        if (rows, limit) == (case.batch, case.users):
            return index
        return dataclasses.replace(case, batch=rows, users=limit).index(generator)

    def _joined(self, name: str, candidate: torch.Tensor, user: torch.Tensor) -> torch.Tensor:
        """The original's input: user rows in the user's columns."""
        ranges = [p.columns for p in self.pairing.pairs if p.original == name and p.compact]
        if ranges[0] is None:
            return user
        joined = candidate.clone()
        for low, high in ranges[0]:
            joined[..., low:high] = user[..., low:high]
        return joined

    def _new(
        self, node: fx.Node, by_name: Mapping[str, Any], compact: Mapping[str, torch.Tensor], index: torch.Tensor
    ) -> Any:
        pair: Pair = next(p for p in self.pairing.pairs if p.name == node.name)
        if pair.original is None:
            return index.to(node.meta["val"].dtype)
        source = compact[pair.original] if pair.compact else by_name[pair.original]
        if pair.columns is None:
            return source
        return torch.cat([source[..., low:high] for low, high in pair.columns], dim=-1)

    def _tensor(
        self,
        node: fx.Node,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        demand: Demand | None,
        case: RatioCase,
        index: torch.Tensor,
        generator: torch.Generator,
    ) -> torch.Tensor:
        if dtype == torch.bool:
            return _mask(shape, generator)
        if demand is not None and demand.offsets is not None:
            return _offsets(shape[0], *demand.offsets, generator).to(dtype)
        if demand is not None and demand.repeats is not None:
            return self._repeats(node, shape[0], demand.repeats, case, index).to(dtype)
        if dtype.is_floating_point or dtype.is_complex:
            drawn = torch.randn(shape, generator=generator).to(dtype)
            if demand is None or not bool(demand.limited.any()):
                return drawn
            return torch.where(demand.limited, _whole(node, shape, demand, generator).to(dtype), drawn)
        if demand is None:
            return torch.randint(0, FREE_RANGE, shape, generator=generator).to(dtype)
        return _whole(node, shape, demand, generator).to(dtype)

    def _repeats(self, node: fx.Node, users: int, total: int, case: RatioCase, index: torch.Tensor) -> torch.Tensor:
        if (users, total) == (case.users, case.batch):
            return torch.bincount(index, minlength=users)
        raise InvalidInput(
            f"valid values of input {node.name!r} cannot be derived: {users} counts must sum to {total}",
            hint="give a saved batch of real inputs with --sample",
        )


def _mask(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Booleans with at least one true in every row."""
    mask = torch.rand(shape, generator=generator) < TRUE_SHARE
    if mask.dim() > 1 and mask.shape[-1]:
        chosen = torch.randint(0, mask.shape[-1], (*shape[:-1], 1), generator=generator)
        mask = mask.scatter(-1, chosen, True)
    return mask


def _offsets(bags: int, values: int, ends: bool, generator: torch.Generator) -> torch.Tensor:
    """Starts of the bags, in order, the first 0; with `ends` the last is the number of values."""
    offsets = torch.randint(0, values + 1, (bags,), generator=generator).sort().values
    if bags:
        offsets[0] = 0
        if ends:
            offsets[-1] = values
    return offsets


def _whole(node: fx.Node, shape: tuple[int, ...], demand: Demand, generator: torch.Generator) -> torch.Tensor:
    """Whole numbers within their limits; lengths reach from 1 to the end of what they are compared with."""
    length = demand.soft_high > 0
    free = torch.where(length, demand.soft_high, FREE_RANGE)
    high = torch.where(demand.limited, demand.high, free)
    low = torch.where(demand.low > -FAR, demand.low, 0)
    low = torch.where(high > 0, low.clamp(min=0), low)
    # A length of 0 would leave softmaxes over nothing.
    low = torch.where(length & (high > 1), low.clamp(min=1), low)
    if bool((low >= high).any()):
        raise InvalidInput(
            f"input {node.name!r} has no valid value: it must be at least {int(low.max())} and below {int(high.min())}",
            hint="a table that it indexes may be empty, or give a saved batch of real inputs with --sample",
        )
    return low + (torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low)).long()


def _with_rows(demand: Demand | None, rows: int) -> Demand | None:
    """What is asked of an expanded input, asked of its compact rows: the same of every row."""
    if demand is None or not demand.low.dim():
        return demand

    def resized(tensor: torch.Tensor, reduced: torch.Tensor) -> torch.Tensor:
        return reduced.expand(rows, *tensor.shape[1:])

    return dataclasses.replace(
        demand,
        low=resized(demand.low, demand.low.amax(0, keepdim=True)),
        high=resized(demand.high, demand.high.amin(0, keepdim=True)),
        soft_high=resized(demand.soft_high, demand.soft_high.amax(0, keepdim=True)),
    )
