"""A saved model in: safe loading, and what its inputs are called."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect as python_inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._export.serde.schema import SCHEMA_VERSION
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ikbo_cli.errors import CorruptModel, ForeignModel, IkboError, MissingOperator
from ikbo_cli.program import archive, safety


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
        """The program as a module with its parameters inside; no guard code of the file is executed.

        Raises:
            CorruptModel: torch cannot build it, because the file contradicts itself.
        """
        try:
            return unlifted(self.exported)
        except Exception as error:  # torch raises whatever its many layers raise
            raise CorruptModel(
                f"{self.path}: torch {torch.__version__} cannot build the program: {_last_line(error)}",
                hint=archive.AGAIN,
            ) from error

    @property
    def inputs(self) -> tuple[ProgramInput, ...]:
        """Tensor inputs in flat order, under the program's own names."""
        nodes = {node.name: node for node in self.exported.graph.nodes if node.op == "placeholder"}
        found = []
        for spec in self.exported.graph_signature.input_specs:
            value = nodes[spec.arg.name].meta.get("val")
            if spec.kind == InputKind.USER_INPUT and isinstance(value, torch.Tensor):
                shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
                found.append(ProgramInput(spec.arg.name, shape, value.dtype, True))
        return tuple(found)


def unlifted(exported: ExportedProgram) -> fx.GraphModule:
    """`exported.module()` without its input checks."""
    if "check_guards" in python_inspect.signature(exported.module).parameters:
        return exported.module(check_guards=False)
    return exported.module()


def load(path: str | Path, *, trust: bool = False) -> Program:
    """Load a `.pt2` file after checking that doing so executes nothing from it.

    Args:
        path: The file; what it is, is told by its content.
        trust: Load it even if that executes code from it. It must be whole all the same.

    Raises:
        IkboError: one class per cause, see `archive.inspect`; MissingOperator names an unregistered operator.
    """
    path = Path(path)
    archive.inspect(path, trust=trust)
    sha256 = archive.sha256_of(path)
    try:
        with _quiet():
            exported = torch.export.load(str(path))
    except Exception as error:  # torch raises whatever its many layers raise
        raise _explained(path, error) from error
    return Program(exported, path, "pt2", sha256, archive.read_manifest(path))


def _explained(path: Path, error: Exception) -> IkboError:
    """Why torch could not load a file that is whole."""
    for document in archive.programs(path):
        operator = safety.missing_operator(document)
        if operator:
            return MissingOperator(
                f"{path} calls the operator {operator}, which is not registered in this process",
                hint="give the module that defines it with --import MODULE, or its library with --load-library ops.so",
            )
        major = document["schema_version"]["major"]
        if major < SCHEMA_VERSION[0]:
            return ForeignModel(
                f"{path} has export schema {major}, the installed torch {torch.__version__} reads only "
                f"{SCHEMA_VERSION[0]}",
                hint=f"load it with the torch that wrote it ({document.get('torch_version', 'older')}), or "
                + archive.RECIPE,
            )
    return CorruptModel(f"{path}: torch {torch.__version__} cannot load it: {_last_line(error)}", hint=archive.AGAIN)


def _last_line(error: Exception) -> str:
    lines = str(error.__cause__ or error).strip().splitlines()
    return lines[-1][:200] if lines else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing the traceback of a load that fails, or a remark about the file's suffix."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
