"""Tables: op -> rule, and rewrite code -> what it does.

A rule has the op's own signature behind the context: tensors arrive as values, and it returns a value (or a list of
them). A rewrite is the better form at a mixing op; its docstring is what `ikbo explain` prints.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any, TypeVar

from torch._ops import OpOverload

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule and when it must run.

    Attributes:
        function: `function(ctx, *args, **kwargs) -> value`.
        always: Run also when no argument is lazy (ops that may start a broadcast); others then run verbatim.
    """

    function: Callable[..., Any]
    always: bool


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """A rewrite: stable code, the redundancy it removes, its status and its documentation."""

    code: str
    name: str
    status: str
    doc: str


RULES: dict[Any, Rule] = {}
REWRITES: dict[str, Rewrite] = {}


def rule(*ops: Any, always: bool = False) -> Callable[[Function], Function]:
    """Register a rule for one or more op overloads; a second rule for an op is an error."""

    def register(function: Function) -> Function:
        for op in ops:
            if op in RULES:
                raise ValueError(f"{op} already has the rule {RULES[op].function.__name__}")
            RULES[op] = Rule(function, always)
        return function

    return register


def rewrite(code: str, name: str, *, status: str = "preview") -> Callable[[Function], Function]:
    """Register a rewrite under a stable code; the docstring of the function documents it."""

    def register(function: Function) -> Function:
        if code in REWRITES:
            raise ValueError(f"{code} is taken by {REWRITES[code].name}")
        REWRITES[code] = Rewrite(code, name, status, inspect.getdoc(function) or "")
        return function

    return register


def load_rules() -> None:
    """Import every file of `rules/`, once."""
    package = importlib.import_module("ikbo_cli.broadcast.rules")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def functional_form(op: Any) -> Any | None:
    """The out-of-place overload of an in-place op (`relu_` -> `relu`), or None when there is none."""
    if not isinstance(op, OpOverload):
        return None
    namespace, _, name = op._schema.name.partition("::")
    if not name.endswith("_") or name.endswith("__"):
        return None
    import torch

    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    overload = op._overloadname
    return getattr(packet, overload, None) if packet is not None else None
