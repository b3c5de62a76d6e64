"""A program out: atomically, with its manifest inside, without example inputs."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.pt2_archive import _package

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
        with _without_copies():
            torch.export.save(stripped, str(temporary), extra_files={MANIFEST: json.dumps(manifest, indent=1)})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _StorageBytes(bytes):
    """Stands for the bytes of a storage until they are written."""

    storage: torch.UntypedStorage


@contextlib.contextmanager
def _without_copies() -> Iterator[None]:
    """Let torch write tensors from where they lie: it copies each twice first, which doubles a large table in memory.

    Where torch does not have the two functions concerned, it saves in its own way.
    """
    if not hasattr(_package, "_get_raw_tensor_bytes"):
        yield
        return
    raw_bytes, write_bytes = _package._get_raw_tensor_bytes, _package.PT2ArchiveWriter.write_bytes

    def view(value: torch.Tensor) -> bytes:
        if isinstance(value, FakeTensor) or not value.data_ptr():
            return raw_bytes(value)
        data = _StorageBytes()
        data.storage = value.cpu().untyped_storage()
        return data

    def write(writer: _package.PT2ArchiveWriter, name: str, data: bytes) -> None:
        if isinstance(data, _StorageBytes):
            size = data.storage.nbytes()
            writer.archive_file.write_record(name, data.storage, size)  # type: ignore[arg-type]  # as torch.save does
        else:
            write_bytes(writer, name, data)

    with (
        mock.patch.object(_package, "_get_raw_tensor_bytes", view),
        mock.patch.object(_package.PT2ArchiveWriter, "write_bytes", write),
    ):
        yield
