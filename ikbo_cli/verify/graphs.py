"""What every part of the check asks of a graph: which ops only move values, nested graphs inlined, its dtype."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

aten = torch.ops.aten

VIEWS = frozenset({
    aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.permute.default, aten.transpose.int,
    aten.t.default, aten.numpy_T.default, aten.mT.default, aten.movedim.int, aten.movedim.intlist,
    aten.select.int, aten.slice.Tensor, aten.narrow.default, aten.expand.default, aten.expand_as.default,
    aten.broadcast_to.default, aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default,
    aten.tensor_split.sections, aten.unbind.int, aten.alias.default, aten.detach.default, aten.detach_.default,
    aten.contiguous.default, aten.view_as.default, aten.reshape_as.default, aten._unsafe_view.default,
    aten.swapaxes.default, aten.adjoint.default,
})  # fmt: skip
"""Ops whose result holds values of the first argument, rearranged."""

COPIES = frozenset({
    aten.cat.default, aten.concat.default, aten.concatenate.default, aten.stack.default, aten.hstack.default,
    aten.vstack.default, aten.repeat.default, aten.tile.default, aten.repeat_interleave.self_int, aten.clone.default,
    aten.flip.default, aten.roll.default, aten.lift_fresh_copy.default, aten.constant_pad_nd.default, aten.pad.default,
})  # fmt: skip
"""Ops that copy values into a new place."""

GATHERS = frozenset({
    aten.index_select.default, aten.index.Tensor, aten.gather.default, aten.take_along_dim.default,
    aten.repeat_interleave.self_Tensor,
})  # fmt: skip
"""Ops that read their first argument at positions which another argument holds."""

CASTS = frozenset({
    aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default, aten.type_as.default,
    torch.ops.prims.convert_element_type.default, aten.lift.default,
})  # fmt: skip

MOVES = VIEWS | COPIES | GATHERS | CASTS | {operator.getitem}

_WRAPPERS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
"""Operators that call a nested graph, and how many arguments stand before it."""


def inlined(module: fx.GraphModule) -> fx.GraphModule:
    """The same program without nested graphs; nodes of an autocast block carry its arguments in `meta["autocast"]`.

    Parameters are shared, not copied. A program without nested graphs is returned as it is.
    """
    if not any(_wrapper(node) for node in module.graph.nodes):
        return module
    graph = fx.Graph()
    _copy_into(graph, module, "", None, None)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr")
    return fx.GraphModule(module, graph)


def _wrapper(node: fx.Node) -> int | None:
    if node.op != "call_function":
        return None
    return _WRAPPERS.get(str(getattr(node.target, "__name__", "")))


def _copy_into(graph: fx.Graph, module: fx.GraphModule, prefix: str, arguments: list[Any] | None, autocast: Any) -> Any:
    """Copy a module's nodes into `graph`; the results of a nested one (`arguments` not None)."""
    mapping: dict[fx.Node, Any] = {}
    given = iter(arguments or [])
    for node in module.graph.nodes:
        if node.op == "placeholder" and arguments is not None:
            mapping[node] = next(given)
        elif node.op == "output" and arguments is not None:
            return fx.map_arg(node.args[0], mapping.__getitem__)
        elif node.target is operator.getitem and isinstance(mapping.get(node.args[0]), (list, tuple)):
            mapping[node] = mapping[node.args[0]][node.args[1]]
        elif (leading := _wrapper(node)) is not None:
            inner = node.args[leading]
            outer = node.args[:leading] if leading > 1 else autocast
            values = [fx.map_arg(a, mapping.__getitem__) for a in node.args[leading + 1 :]]
            nested: Any = module.get_submodule(inner.target)
            mapping[node] = _copy_into(graph, nested, f"{prefix}{inner.target}.", values, outer)
        else:
            mapping[node] = copy = graph.node_copy(node, mapping.__getitem__)
            if node.op == "get_attr":
                copy.target = f"{prefix}{node.target}"
            if autocast is not None:
                copy.meta["autocast"] = autocast
    return None


def written_attributes(graph: fx.Graph) -> set[fx.Node]:
    """Parameters and buffers that the program changes in place (counters of batch norms, caches)."""
    found = set()
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                root = value
                while isinstance(root, fx.Node) and root.target in VIEWS | {operator.getitem}:
                    root = root.args[0]
                if isinstance(root, fx.Node) and root.op == "get_attr":
                    found.add(root)
    return found


def program_dtype(module: fx.GraphModule) -> torch.dtype:
    """The dtype a program computes in: the narrowest floating dtype of its arithmetic, float32 if there is none.

    Tables that are stored in 16 bits and only looked up do not make a 16-bit program.
    """
    narrowest = torch.float32
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target in MOVES or node.target is aten.embedding.default:
            continue
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
                # Of the two 16-bit dtypes the coarser one rules.
                narrowest = value.dtype if narrowest != torch.bfloat16 else narrowest
    return narrowest


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The outputs of a call in flat order; numbers become tensors, absent outputs are left out."""
    leaves = [leaf for leaf in pytree.tree_leaves(result) if leaf is not None]
    return [leaf if isinstance(leaf, torch.Tensor) else torch.tensor(leaf) for leaf in leaves]


def output_names(module: fx.GraphModule) -> list[str]:
    """Names of the outputs in the order of `tensors_of`."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    leaves = [leaf for leaf in pytree.tree_leaves(output.args) if leaf is not None]
    return [leaf.name if isinstance(leaf, fx.Node) else "constant" for leaf in leaves]
