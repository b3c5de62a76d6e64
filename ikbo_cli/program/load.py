"""A saved model in: safe loading, and what its inputs are called."""

from __future__ import annotations

import dataclasses
import inspect as python_inspect
import logging
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from ikbo_cli.errors import CorruptModel, ForeignModel, MissingOperator
from ikbo_cli.program import archive


@dataclasses.dataclass(frozen=True)
class ProgramInput:
    """One input in flat order. `shape` holds ints, or the names of symbolic sizes."""

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    is_tensor: bool


@dataclasses.dataclass
class Program:
    """A loaded model.

    Attributes:
        exported: The exported program.
        path: Where it came from.
        format: `pt2`.
        sha256: Digest of the file.
        manifest: Its `ikbo.json`, where `ikbo transform` wrote it.
    """

    exported: ExportedProgram
    path: Path | None
    format: str
    sha256: str
    manifest: dict[str, Any] | None

    def module(self) -> fx.GraphModule:
        """The program as a module with its parameters inside; no guard code of the file is executed."""
        return unlifted(self.exported)

    @property
    def inputs(self) -> tuple[ProgramInput, ...]:
        """Inputs in flat order, under the program's own names."""
        found = []
        for spec in self.exported.graph_signature.input_specs:
            if spec.kind != torch.export.graph_signature.InputKind.USER_INPUT:
                continue
            node = next(n for n in self.exported.graph.nodes if n.name == spec.arg.name)
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                shape = tuple(s if isinstance(s, int) else str(s) for s in value.shape)
                found.append(ProgramInput(node.name, shape, value.dtype, True))
        return tuple(found)


def unlifted(exported: ExportedProgram) -> fx.GraphModule:
    """`exported.module()` without its input checks."""
    if "check_guards" in python_inspect.signature(exported.module).parameters:
        return exported.module(check_guards=False)
    return exported.module()


def load(path: str | Path, *, trust: bool = False) -> Program:
    """Load a `.pt2` file after checking that doing so executes nothing from it.

    Raises:
        IkboError: one class per cause, see `archive.inspect`; MissingOperator names an unregistered operator.
    """
    path = Path(path)
    archive.inspect(path, trust=trust)
    messages = _Messages()
    logger = logging.getLogger("torch")
    logger.addHandler(messages)
    try:
        exported = torch.export.load(str(path))
    except Exception as error:
        text = " ".join([str(error), str(error.__cause__ or ""), str(error.__context__ or ""), *messages.texts])
        operator = _missing_operator(text)
        if operator:
            raise MissingOperator(
                f"{path} calls the operator {operator}, which is not registered in this process",
                hint="load the library that defines it: use the Python API after importing it",
            ) from error
        if "schema" in text.lower() and "version" in text.lower():
            raise ForeignModel(
                f"{path}: torch {torch.__version__} cannot read its schema", hint=archive.RECIPE
            ) from error
        raise CorruptModel(
            f"{path}: torch cannot load it: {_first_line(error)}", hint="export the file again"
        ) from error
    finally:
        logger.removeHandler(messages)
    return Program(exported, path, "pt2", archive.sha256_of(path), archive.read_manifest(path))


class _Messages(logging.Handler):
    """Keeps what torch only logs: the reason why an operator could not be resolved."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _missing_operator(text: str) -> str | None:
    import re

    for pattern in (r"torch\.ops\.([\w.]+)", r"([\w]+::[\w.]+)"):
        for name in re.findall(pattern, text):
            space, _, rest = name.replace("::", ".").partition(".")
            packet = getattr(getattr(torch.ops, space), rest.split(".")[0], None) if rest else None
            if rest and packet is None:
                return f"{space}::{rest}"
    return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
