"""Which input of the optimized program holds what the original's input holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ikbo_cli.errors import InvalidInput


@dataclasses.dataclass(frozen=True)
class Pair:
    """One input of the optimized program.

    Attributes:
        name: Its name.
        original: The original's input, or None for the index.
        compact: It has one row a user; the original gets it gathered by the index.
        columns: Half-open ranges of the original's last axis that it holds, or None for all.
    """

    name: str
    original: str | None
    compact: bool
    columns: tuple[tuple[int, int], ...] | None = None


@dataclasses.dataclass(frozen=True)
class Pairing:
    """All pairs, in the optimized program's order. `single_user`: there is no index, and one user a call."""

    pairs: tuple[Pair, ...]
    single_user: bool = False

    @property
    def compact_originals(self) -> set[str]:
        """Inputs of the original that repeat user rows, wholly or in some columns."""
        return {p.original for p in self.pairs if p.compact and p.original is not None}


def pair_inputs(original: fx.GraphModule, optimized: fx.GraphModule, manifest: Mapping[str, Any] | None) -> Pairing:
    """Pair through the manifest, without one by name.

    Raises:
        InvalidInput: an input has no partner.
    """
    olds, news = _inputs(original), _inputs(optimized)
    if manifest is None:
        pairing = _by_name(olds, news)
    else:
        listed = {item["name"]: item for item in manifest["inputs"]}
        unknown = [n.name for n in news if n.name not in listed]
        if unknown:
            raise InvalidInput(
                f"the manifest does not list {', '.join(unknown)}, an input of the optimized program",
                hint="the file was changed after `ikbo transform` wrote it",
            )
        pairs = [_listed(listed[n.name]) for n in news]
        pairing = Pairing(tuple(pairs), manifest.get("form") == "single-user")
    names = {n.name for n in olds}
    wrong = [p.original for p in pairing.pairs if p.original is not None and p.original not in names]
    if wrong:
        raise InvalidInput(
            f"the original has no input {', '.join(wrong)}", hint="its inputs: " + ", ".join(sorted(names))
        )
    return pairing


def _listed(item: Mapping[str, Any]) -> Pair:
    columns = item.get("columns")
    ranges = tuple((low, high) for low, high in columns) if columns else None
    return Pair(item["name"], item["original"], bool(item["compact"]), ranges)


def _inputs(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _by_name(olds: Sequence[fx.Node], news: Sequence[fx.Node]) -> Pairing:
    """Equal names pair; one more integer vector is the index, and what has not its rows is compact."""
    old_names = {n.name for n in olds}
    extra = [n for n in news if n.name not in old_names]
    missing = [n.name for n in olds if n.name not in {n.name for n in news}]
    index = extra[0] if len(extra) == 1 and _is_vector(extra[0]) else None
    unpaired = missing + [n.name for n in extra if n is not index]
    if unpaired:
        raise InvalidInput(
            f"inputs without a partner of the same name: {', '.join(unpaired)}",
            hint="verify a file that carries a manifest, or give both programs the same input names",
        )
    rows = None if index is None else str(index.meta["val"].shape[0])
    pairs = [
        Pair(n.name, None, False)
        if n is index
        else Pair(n.name, n.name, rows is not None and _rows(n) not in (None, rows))
        for n in news
    ]
    return Pairing(tuple(pairs))


def _is_vector(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.dtype in (torch.int32, torch.int64)


def _rows(node: fx.Node) -> str | None:
    value = node.meta.get("val")
    return str(value.shape[0]) if isinstance(value, torch.Tensor) and value.dim() else None
