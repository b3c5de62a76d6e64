"""Which in-place ops can be treated as if they returned a new tensor.

Exported programs keep `relu_`, `add_`, `masked_fill_`, `copy_`. An in-place op whose target shares memory with nothing
that is read later is *soft*: its out-of-place form says the same. Otherwise every tensor of that memory is *pinned*:
the walk runs those ops exactly as they stand, on written tensors.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload

# Ops that may return their input itself although their schema does not say so.
_IDENTITY_OPS = {torch.ops.aten.dropout.default, torch.ops.aten.alpha_dropout.default}


def pinned_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that must be run verbatim because memory they share is mutated and read again."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    root: dict[fx.Node, fx.Node] = {}
    members: dict[fx.Node, list[fx.Node]] = {}
    mutations: list[tuple[fx.Node, fx.Node]] = []
    for node in graph.nodes:
        base = _aliased(node)
        root[node] = root.get(base, node) if base is not None else node
        members.setdefault(root[node], []).append(node)
        target = mutated(node)
        if target is not None:
            mutations.append((node, target))
    pinned: set[fx.Node] = set()
    for node, target in mutations:
        family = members[root[target]]
        read_later = any(
            member not in (node, target) and any(order[user] > order[node] for user in member.users)
            for member in family
            if order[member] < order[node]
        )
        if read_later or root[target].op in ("placeholder", "get_attr"):
            pinned.update(family)
    return pinned


def mutated(node: fx.Node) -> fx.Node | None:
    """The argument that an op writes to, or None."""
    if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node):
                return value
    return None


def _aliased(node: fx.Node) -> fx.Node | None:
    """The argument whose memory the result shares, or may share."""
    if node.op != "call_function":
        return None
    if not isinstance(node.target, OpOverload):
        first = node.args[0] if node.args else None
        return first if isinstance(first, fx.Node) and getattr(node.target, "__name__", "") == "getitem" else None
    if node.target in _IDENTITY_OPS and isinstance(node.args[0], fx.Node):
        return node.args[0]
    returns = node.target._schema.returns
    if not any(r.alias_info is not None for r in returns):
        return None
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and isinstance(value, fx.Node):
            return value
    return None
