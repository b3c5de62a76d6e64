"""From a walk to a program: a module with the new signature, exported again with named dynamic dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.export import Dim, ExportedProgram
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

from ikbo_cli.broadcast import Walk
from ikbo_cli.errors import UnsupportedProgram

EXAMPLE_BATCH = 61
EXAMPLE_USERS = 3


def build_module(original: fx.GraphModule, walk: Walk) -> fx.GraphModule:
    """The rewritten program as a module: parameters shared with the original, its pytree kept.

    The index, where one was added, is the last keyword input.
    """
    codegen = original.graph._codegen
    assert isinstance(codegen, _PyTreeCodeGen)
    info = codegen.pytree_info
    in_spec, names = info.in_spec, list(info.orig_args)
    added = [item.node.name for item in walk.inputs if item.original is None]
    if added:
        args, kwargs = pytree.tree_unflatten([0] * in_spec.num_leaves, in_spec)
        in_spec = pytree.tree_structure((args, {**kwargs, **dict.fromkeys(added, 0)}))
        names += added
    walk.graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(names, in_spec, info.out_spec)))
    module = fx.GraphModule(original, walk.graph)
    _keep_buffer_kinds(original, module)
    return module.eval()


def _keep_buffer_kinds(original: fx.GraphModule, module: fx.GraphModule) -> None:
    """Copying attributes turns constants and non-persistent buffers into persistent ones: undo that."""
    buffers = dict(original.named_buffers())
    persistent = set(original.state_dict(keep_vars=True))
    for name, tensor in list(module.named_buffers()):
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        if name not in buffers:
            del owner._buffers[leaf]
            setattr(owner, leaf, tensor)
        elif name not in persistent:
            owner._non_persistent_buffers_set.add(leaf)


def export_program(original: fx.GraphModule, module: fx.GraphModule, walk: Walk) -> ExportedProgram:
    """Export the rewritten module with the original's dynamic dims, and `U` for the rows of compact inputs.

    Raises:
        UnsupportedProgram: torch cannot export the rewritten program; carries its first line.
    """
    dims = _Dims(original)
    examples: list[Any] = []
    shapes: list[Any] = []
    placeholders = {node.name: node for node in original.graph.nodes if node.op == "placeholder"}
    batch_rows: Any = None
    for item in walk.inputs:
        if item.original is None:
            examples.append(torch.zeros(dims.example(batch_rows), dtype=item.node.meta["val"].dtype))
            shapes.append({0: dims.dim(batch_rows)})
            continue
        value = placeholders[item.original].meta.get("val")
        if not isinstance(value, torch.Tensor):
            examples.append(value if not isinstance(value, torch.SymInt) else dims.example(value))
            shapes.append(None if not isinstance(value, torch.SymInt) else Dim.DYNAMIC)
            continue
        sizes: list[Any] = list(value.shape)
        if item.compact:
            batch_rows = sizes[0]
            sizes[0] = "U"
        example = torch.zeros([dims.example(size) for size in sizes], dtype=value.dtype, device=value.device)
        examples.append(example)
        shapes.append({axis: dims.dim(size) for axis, size in enumerate(sizes) if not isinstance(size, int)})
    index = [i for i, item in enumerate(walk.inputs) if item.original is None]
    for i in index:
        examples[i] = examples[i].to(walk.inputs[i].node.meta["val"].device)
    in_spec = module.graph._codegen.pytree_info.in_spec  # type: ignore[attr-defined]
    args, kwargs = pytree.tree_unflatten(examples, in_spec)
    arg_shapes, kwarg_shapes = pytree.tree_unflatten(shapes, in_spec)
    names = module.graph._codegen.pytree_info.orig_args  # type: ignore[attr-defined]
    dynamic = {**dict(zip(names, arg_shapes, strict=False)), **kwarg_shapes}
    try:
        return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic, strict=False)
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnsupportedProgram(
            f"torch.export cannot export the rewritten program: {first}",
            hint="report this with the model; `--skip` leaves single sites alone",
        ) from error


class _Dims:
    """Named dims and example sizes for the symbols of the original's inputs."""

    def __init__(self, original: fx.GraphModule) -> None:
        self._dims: dict[str, Any] = {"U": Dim("U")}
        self._sizes: dict[str, int] = {"U": EXAMPLE_USERS}
        self._ranges: dict[str, tuple[int, int | None]] = {}
        symbols: list[str] = []
        for node in original.graph.nodes:
            value = node.meta.get("val")
            if node.op != "placeholder" or not isinstance(value, torch.Tensor):
                continue
            for size in value.shape:
                if not isinstance(size, int):
                    for symbol in sorted(size.node.expr.free_symbols, key=str):
                        self._ranges.setdefault(str(symbol), _bounds(size, symbol))
                        if str(symbol) not in symbols:
                            symbols.append(str(symbol))
        for position, name in enumerate(symbols):
            low, high = self._ranges[name]
            # Sizes of at least 2 and different from each other keep the dims apart.
            wanted = max(low, EXAMPLE_BATCH + position)
            self._sizes[name] = wanted if high is None else max(2, min(wanted, high))
            limits = {}
            if low > 2:
                limits["min"] = low
            if high is not None:
                limits["max"] = high
            self._dims[name] = Dim("B" if position == 0 else f"D{position}", **limits)
        self._first = symbols[0] if symbols else None

    def example(self, size: Any) -> int:
        if isinstance(size, int):
            return size
        if isinstance(size, str):
            return self._sizes[size]
        expression = size.node.expr
        return int(expression.subs({s: self._sizes[str(s)] for s in expression.free_symbols}))

    def dim(self, size: Any) -> Any:
        if isinstance(size, str):
            return self._dims[size]
        expression = size.node.expr
        if isinstance(expression, sympy.Symbol):
            return self._dims[str(expression)]
        (symbol,) = expression.free_symbols
        factor, rest = expression.coeff(symbol), expression.subs(symbol, 0)
        derived = self._dims[str(symbol)] * int(factor) if factor != 1 else self._dims[str(symbol)]
        return derived + int(rest) if rest != 0 else derived


def _bounds(size: Any, symbol: Any) -> tuple[int, int | None]:
    env = size.node.shape_env
    bounds = env.var_to_range.get(symbol) if env is not None else None
    if bounds is None:
        return 0, None
    upper = int(bounds.upper) if bounds.upper.is_Integer and int(bounds.upper) < 2**31 else None
    return (int(bounds.lower) if bounds.lower.is_Integer else 0), upper


def flat_names(module: fx.GraphModule) -> Sequence[str]:
    """Names of the inputs in flat order."""
    return [node.name for node in module.graph.nodes if node.op == "placeholder"]
