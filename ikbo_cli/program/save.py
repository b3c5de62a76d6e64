"""A program out: atomically, with its manifest inside, without example inputs."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from ikbo_cli.errors import OutputExists, UsageError
from ikbo_cli.program.archive import MANIFEST


def save(exported: ExportedProgram, path: str | Path, *, manifest: dict[str, Any], force: bool = False) -> None:
    """Write a program as `.pt2`; the file appears whole or not at all.

    Args:
        exported: The program; not changed (its example inputs are left out of the file).
        path: Where to write.
        manifest: Stored inside as `ikbo.json`.
        force: Replace an existing file.

    Raises:
        OutputExists: the path is taken and `force` is False.
        UsageError: the path is a folder, or its folder does not exist.
    """
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint="give the name of the file to write")
    if not path.resolve().parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}", hint="create it first")
    if path.exists() and not force:
        raise OutputExists(f"{path} exists", hint="give --force to overwrite it")
    stripped = copy.copy(exported)
    stripped._example_inputs = None
    # torch names the folder inside the archive after the file, so the temporary one carries the final name.
    folder = Path(tempfile.mkdtemp(prefix=f".{path.stem}.", suffix=".ikbo-tmp", dir=path.resolve().parent))
    try:
        temporary = folder / path.name
        torch.export.save(stripped, str(temporary), extra_files={MANIFEST: json.dumps(manifest, indent=1)})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
