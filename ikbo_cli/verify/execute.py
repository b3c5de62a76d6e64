"""A program run as it is: in its own precision, without changing what it shares with other programs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ikbo_cli.verify.graphs import tensors_of, written_attributes
from ikbo_cli.verify.selections import Choice, chosen_of


def run_program(
    module: fx.GraphModule, args: Sequence[Any], record: Sequence[fx.Node] = ()
) -> tuple[list[torch.Tensor], dict[str, Choice]]:
    """Run a program in its own precision.

    Args:
        module: The program, without nested graphs (`graphs.inlined`).
        args: Its inputs in flat order; not changed.
        record: Selections to record.

    Returns:
        The outputs in flat order, and the recorded selections by node name.
    """
    runner = _Recorder(module, record)
    with torch.no_grad():
        result = runner.run(*own_copies(args), enable_io_processing=False)
    return tensors_of(result), runner.choices


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, record: Sequence[fx.Node]) -> None:
        super().__init__(module)
        self.choices: dict[str, Choice] = {}
        self._record = {node.name for node in record}
        self._written = written_attributes(module.graph)

    def run_node(self, n: fx.Node) -> Any:
        if n in self._written:
            return super().run_node(n).clone()
        with _autocast(n):
            if n.name not in self._record:
                return super().run_node(n)
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            kept = tuple(own_copies(args))
            result = self.call_function(n.target, args, kwargs)  # type: ignore[arg-type]
            self.choices[n.name] = Choice(kept, kwargs, chosen_of(n, result).clone())
            return result


def _autocast(node: fx.Node) -> contextlib.AbstractContextManager[Any]:
    block = node.meta.get("autocast")
    if block is None or node.op != "call_function":
        return contextlib.nullcontext()
    device, dtype, enabled, cache = block
    return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)


def own_copies(args: Sequence[Any]) -> list[Any]:
    """Copies of the tensors: a program may change its inputs in place."""
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
