"""The truth: a program interpreted in float64, one node at a time.

`.double()` on a module is not enough: casts, dtype arguments and dtype checks inside the graph stop it. Parameters are
lifted where they are read, a large weight in blocks and a table by the rows that are read, so that nothing of a model's
size is ever held in float64.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ikbo_cli.verify.execute import own_copies
from ikbo_cli.verify.graphs import CASTS, VIEWS, inlined, tensors_of, written_attributes
from ikbo_cli.verify.selections import Choice, chosen_of, replay, selections

aten = torch.ops.aten

BLOCK = 1 << 23
"""Elements of a weight that are lifted at a time: 64 MiB in float64."""

_TABLE_READS = {aten.embedding.default, aten.index_select.default, aten.index.Tensor, aten.gather.default}
_BAGS = {aten.embedding_bag.default, aten.embedding_bag.padding_idx}
_WIDE = {
    aten.mm.dtype: aten.mm.default, aten.bmm.dtype: aten.bmm.default, aten.addmm.dtype: aten.addmm.default,
    aten.baddbmm.dtype: aten.baddbmm.default,
}  # fmt: skip
"""Products with a wider result: in float64 the plain op."""


def run_reference(
    module: fx.GraphModule, args: Sequence[Any], choices: Mapping[str, torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """Interpret a program in float64.

    Args:
        module: The unlifted program.
        args: Its inputs in flat order, in their own dtypes; not changed.
        choices: What selections shall choose, by node name; the others choose for themselves.

    Returns:
        The outputs in flat order; floating-point ones in float64.
    """
    return trace_reference(module, args, choices)[0]


def trace_reference(
    module: fx.GraphModule, args: Sequence[Any], choices: Mapping[str, torch.Tensor] | None = None
) -> tuple[list[torch.Tensor], dict[str, Choice]]:
    """As `run_reference`; also every selection with the float64 scores that it read."""
    interpreter = _Float64(inlined(module), choices or {})
    with torch.no_grad(), _float64_by_default():
        result = interpreter.run(*[_lift(a) for a in own_copies(args)], enable_io_processing=False)
        return [_lift(t) for t in tensors_of(result)], interpreter.made


class _Float64(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, choices: Mapping[str, torch.Tensor]) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.choices = choices
        self.made: dict[str, Choice] = {}
        self._selects = {node.name for node in selections(module.graph)}
        self._written = written_attributes(module.graph)

    def run_node(self, n: fx.Node) -> Any:
        if n in self._written:
            return _lift(super().run_node(n).clone())
        if n.op != "call_function" or n.target is operator.getitem:
            return super().run_node(n)
        if n.target is aten._assert_tensor_metadata.default:
            return None
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.name in self._selects:
            return self._select(n, tuple(_lift(a) for a in args), {k: _lift_dtype(v) for k, v in kwargs.items()})
        target: Any = _WIDE.get(n.target, n.target)  # type: ignore[call-overload]
        if target in VIEWS:
            # Of a weight it stays a view in the weight's own dtype, lifted by whoever computes with it.
            return target(*args, **kwargs)
        if target in _TABLE_READS:
            return _lift(target(*args, **kwargs))
        if target in _BAGS:
            return _bag(target, args, kwargs)
        if target in CASTS:
            return _cast(target, args, kwargs)
        if n.target in _WIDE:
            args = args[:-1]
        blocked = _in_blocks(target, args, kwargs)
        if blocked is not None:
            return blocked
        lifted = [_lift_dtype(_lift(a)) for a in args]
        return _lift(target(*lifted, **{key: _lift_dtype(_lift(value)) for key, value in kwargs.items()}))

    def _select(self, n: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        target: Any = n.target
        kept = tuple(own_copies(args))
        chosen = self.choices.get(n.name)
        result = target(*args, **kwargs) if chosen is None else replay(n, args, kwargs, chosen)
        self.made[n.name] = Choice(kept, kwargs, chosen_of(n, result).clone())
        return result


def _lift(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dtype.is_floating_point and value.dtype != torch.float64:
            return value.double()
        return value.to(torch.complex128) if value.dtype.is_complex else value
    if isinstance(value, (list, tuple)):
        return [_lift(item) for item in value]
    return value


def _lift_dtype(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else torch.complex128 if value.is_complex else value
    return value


def _cast(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A cast between floating dtypes changes nothing in float64; the copy that it makes stays a copy."""
    source = args[0]
    wanted = [_lift_dtype(_lift(a)) for a in args[1:]]
    named = {key: _lift_dtype(_lift(value)) for key, value in kwargs.items()}
    if source.dtype.is_floating_point and source.dtype != torch.float64:
        result = target(source[:0] if source.dim() else source, *wanted, **named)
        if result.dtype == torch.float64:
            return source  # a weight: lifted where it is read
    result = target(source, *wanted, **named)
    return result.clone() if result is source else result


def _bag(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A bag over the rows that it reads: `table[ids]`, numbered from 0, and a row of zeros for the padding."""
    table, ids, *rest = args
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    rows = torch.cat([table.index_select(0, ids.flatten()).double(), torch.zeros(1, table.shape[1])])
    numbers = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
    padding = given.get("padding_idx")
    if padding is not None and padding >= -table.shape[0] and target is aten.embedding_bag.padding_idx:
        numbers = numbers.masked_fill(ids == padding % table.shape[0], ids.numel())
        rest = [*rest[:-1], ids.numel()]
    return _lift(target(rows, numbers, *[_lift(a) for a in rest], **{k: _lift(v) for k, v in kwargs.items()}))


def _in_blocks(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """A product with a large weight, a block of its columns at a time; None where it is not one."""
    bias = None
    if target is aten.linear.default:
        x, weight, *more = args
        bias = more[0] if more else kwargs.get("bias")
    elif target in (aten.mm.default, aten.matmul.default) and len(args) == 2 and args[1].dim() == 2:
        x, weight = args[0], args[1].t()
    elif target is aten.addmm.default and not kwargs:
        bias, x, weight = args[0], args[1], args[2].t()
    else:
        return None
    if weight.dim() != 2 or weight.numel() <= BLOCK:
        return None
    x = _lift(x)
    rows = max(1, BLOCK // weight.shape[1])
    product = torch.cat([torch.nn.functional.linear(x, part.double()) for part in weight.split(rows)], dim=-1)
    return product if bias is None else product + _lift(bias)


@contextlib.contextmanager
def _float64_by_default() -> Iterator[None]:
    """Ops that make floats of integers follow torch's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
