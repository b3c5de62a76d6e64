"""Effective sizes: which dynamic dimension is the batch, which are users, and what they are at this workload."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ikbo_cli.broadcast import Broadcast, Walk
from ikbo_cli.broadcast.maps import Expand, Gather, Repeat, Tile
from ikbo_cli.broadcast.values import shape_of
from ikbo_cli.errors import UsageError

DEFAULT_BATCH = 1024
DEFAULT_RATIO = 70.0
DEFAULT_LENGTH = 50


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The workload a caller asks for: candidates and users; `assumed` where the defaults stand."""

    batch: int
    users: int
    assumed: bool

    @property
    def ratio(self) -> float:
        """Candidates a user."""
        return self.batch / self.users


def wanted_workload(batch: int | None, ratio: float | None, users: int | None) -> Wanted:
    """Resolve `--batch`, `--ratio` and `--users`.

    Raises:
        UsageError: both a ratio and a number of users, or a number below one.
    """
    if ratio is not None and users is not None:
        raise UsageError("--ratio and --users exclude each other", hint="give one of them")
    for name, number in (("--batch", batch), ("--ratio", ratio), ("--users", users)):
        if number is not None and number < 1:
            raise UsageError(f"{name} must be at least 1")
    size = DEFAULT_BATCH if batch is None else batch
    count = users if users is not None else max(1, math.ceil(size / (DEFAULT_RATIO if ratio is None else ratio)))
    return Wanted(size, count, batch is None or (ratio is None and users is None))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Concrete sizes at a workload: of every hint prime, and of every symbol of the original."""

    by_hint: dict[int, int]
    by_symbol: dict[str, int]

    def concrete(self, size: int) -> int:
        """A hint size at this workload."""
        factor = 1
        for prime, value in self.by_hint.items():
            while size and size % prime == 0:
                size, factor = size // prime, factor * value
        return size * factor

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A hint shape at this workload."""
        return tuple(self.concrete(size) for size in shape)


def bind(walk: Walk, original: fx.GraphModule, wanted: Wanted) -> tuple[Sizes, bool]:
    """Give every dynamic dimension a size; also whether the program has user rows of its own to size."""
    roles = _roles(walk, wanted)
    ranges = symbol_ranges(original)
    by_symbol: dict[str, int] = {}
    by_hint: dict[int, int] = {}
    has_users = False
    for name, prime in walk.hints.items():
        role = roles.get(prime)
        has_users |= role == wanted.users and (name == "U" or role is not None)
        low, high = ranges.get(name, (0, None))
        fallback = wanted.batch if name == _first_symbol(original) else DEFAULT_LENGTH
        size = role if role is not None else fallback
        size = max(size, low) if high is None else max(min(size, high), low)
        by_symbol[name], by_hint[prime] = size, size
    return Sizes(by_hint, by_symbol), has_users


def _first_symbol(original: fx.GraphModule) -> str | None:
    for node in original.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            for size in value.shape:
                if not isinstance(size, int):
                    return str(sorted(size.node.expr.free_symbols, key=str)[0])
    return None


def _roles(walk: Walk, wanted: Wanted) -> dict[int, int]:
    """What each hint stands for, read off the maps of the broadcasts that were found."""
    roles: dict[int, int] = {}
    found = [value for site in walk.sites for value in site.inputs]
    per_user = math.ceil(wanted.batch / wanted.users)

    def put(size: int, value: int) -> None:
        if size in walk.hints.values():
            roles.setdefault(size, value)

    if "U" in walk.hints:
        put(walk.hints["U"], wanted.users)
        index = next((item.node for item in walk.inputs if item.original is None), None)
        if index is not None:
            put(shape_of(index)[0], wanted.batch)
    for kind in (Gather, Repeat, Tile, Expand):
        for value in found:
            if isinstance(value.map.steps[-1], kind):
                _put_levels(value, wanted, per_user, put)
    return roles


def _put_levels(value: Broadcast, wanted: Wanted, per_user: int, put: Any) -> None:
    steps = value.map.steps
    source = shape_of(value.node)[value.dim] // value.mult
    for position, step in enumerate(steps):
        # Levels in between are spread geometrically.
        share = (position + 1) / len(steps)
        rows = round(wanted.users * (wanted.batch / wanted.users) ** share)
        if isinstance(step, (Repeat, Tile)):
            times = step.times.hint if hasattr(step.times, "hint") else step.times
            put(times if isinstance(times, int) else 0, per_user)
        elif isinstance(step, Expand) and source == 1 and value.dim > 0:
            put(step.rows, per_user)
            put(shape_of(value.node)[0], wanted.users)
        else:
            put(step.rows, rows)
    put(source, wanted.users)


def symbol_ranges(original: fx.GraphModule) -> dict[str, tuple[int, int | None]]:
    """Declared bounds of every symbol of the inputs."""
    ranges: dict[str, tuple[int, int | None]] = {}
    for node in original.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(value, torch.Tensor):
            continue
        for size in value.shape:
            if isinstance(size, int):
                continue
            for symbol in size.node.expr.free_symbols:
                bounds = size.node.shape_env.var_to_range.get(symbol) if size.node.shape_env is not None else None
                if bounds is None:
                    continue
                upper = int(bounds.upper) if bounds.upper.is_Integer and int(bounds.upper) < 2**31 else None
                ranges[str(symbol)] = (int(bounds.lower) if bounds.lower.is_Integer else 0, upper)
    return ranges


def original_specs(original: fx.GraphModule, sizes: Sizes) -> list[Any]:
    """Shape and dtype of the original's inputs at a workload."""
    specs: list[Any] = []
    for node in original.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                specs.append((tuple(evaluate(s, sizes.by_symbol) for s in value.shape), value.dtype))
            else:
                specs.append(evaluate(value, sizes.by_symbol) if isinstance(value, torch.SymInt) else value)
    return specs


def new_specs(walk: Walk, sizes: Sizes) -> list[Any]:
    """Shape and dtype of the rewritten program's inputs at a workload."""
    specs: list[Any] = []
    for item in walk.inputs:
        value = item.node.meta["val"]
        specs.append((sizes.shape(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value)
    return specs


def evaluate(size: Any, symbols: dict[str, int]) -> int:
    """A symbolic size with numbers for its symbols."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs({s: symbols[str(s)] for s in expression.free_symbols}))
