"""Looking into a model file without loading it: what it is, whether it is whole, what its manifest says."""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._export.serde.schema import SCHEMA_VERSION
from torch.export.pt2_archive.constants import ARCHIVE_VERSION_PATH, ARCHIVE_VERSION_VALUE

from ikbo_cli.errors import CorruptModel, ForeignModel, IkboError, ModelNotFound, NewerModel, TruncatedModel
from ikbo_cli.program import safety

MANIFEST = "ikbo.json"
RECIPE = (
    "export the model first: torch.export.save(torch.export.export(model.eval(), args, "
    'dynamic_shapes=...), "model.pt2")'
)
AGAIN = "copy the file again from where it was written, or export the model again"

_UNREADABLE = (
    zipfile.BadZipFile, zlib.error, LookupError, EOFError, OSError, TypeError, AttributeError, RuntimeError, ValueError,
    OverflowError, MemoryError,
)  # fmt: skip
_LOCAL_HEADER = 30  # bytes before the name of a record; the last four are the lengths of the name and of what follows
_FOREIGN = {
    "aoti": "an AOTInductor package: compiled code, from which the program cannot be recovered",
    "torchscript": "a TorchScript file",
    "state_dict": "a file of torch.save (weights, or a pickled module), which holds no program",
    "onnx": "an ONNX file",
    "pickle": "a Python pickle, which is never opened",
    "legacy": "a .pt2 in the layout of torch 2.7 or older, all of whose parts are pickles",
    "unknown": "no model file that is known",
}
_HINTS = {
    "aoti": "give the .pt2 that torch.export.save wrote before it was compiled; without one, " + RECIPE,
    "torchscript": "from the nn.Module, " + RECIPE,
    "state_dict": "load the weights into the nn.Module, then " + RECIPE,
    "onnx": "from the nn.Module, " + RECIPE,
    "pickle": "open it yourself where it was made, then " + RECIPE,
    "legacy": "load it with the torch that wrote it and save it again with torch 2.8 or newer",
    "unknown": RECIPE,
}


def sha256_of(path: str | Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def detect_format(path: str | Path) -> str:
    """What a file is, by its content.

    Returns:
        `pt2`, `aoti`, `torchscript`, `state_dict`, `onnx`, `pickle`, `legacy` (a `.pt2` of torch 2.7 or older),
        `truncated`, `empty` or `unknown`.

    Raises:
        OSError: it cannot be read.
        zipfile.BadZipFile: its table of contents is damaged.
    """
    with open(path, "rb") as file:
        head = file.read(64)
    if not head:
        return "empty"
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return _archive_format(archive.namelist())
    if head[:4] == b"PK\x03\x04":
        return "truncated"
    # ONNX is a protobuf message: its first field is a small version number, one of its other fields follows.
    if head[:1] == b"\x08" and len(head) > 2 and head[1] < 32 and head[2] in b"\x12\x1a\x22\x28\x32\x3a\x42":
        return "onnx"
    return "pickle" if head[:1] == b"\x80" and head[1:2] <= b"\x05" else "unknown"


def _archive_format(names: list[str]) -> str:
    records = [name.partition("/")[2] for name in names]
    if any(record.startswith("data/aotinductor/") for record in records):
        return "aoti"
    if any(record.startswith("models/") for record in records):
        return "pt2"
    if "serialized_exported_program.json" in names:
        return "legacy"
    if "constants.pkl" in records or any(record.startswith("code/") for record in records):
        return "torchscript"
    return "state_dict" if "data.pkl" in records else "unknown"


def inspect(path: Path, *, trust: bool) -> None:
    """Check a file before torch opens it.

    Raises:
        ModelNotFound: there is no such file.
        TruncatedModel: it ends early.
        CorruptModel: a checksum or a record is wrong.
        ForeignModel: it is something else; the hint says how to get a `.pt2`.
        NewerModel: its schema is newer than the installed torch.
        UnsafeModel: loading it would execute code from it (not raised with `trust`).
    """
    if not path.exists():
        raise ModelNotFound(f"{path}: no such file", hint="check the path")
    if path.is_dir():
        raise ForeignModel(f"{path} is a folder", hint="give the path of a .pt2 file")
    try:
        kind = detect_format(path)
    except PermissionError as error:
        raise ModelNotFound(f"{path} cannot be opened: {error.strerror}", hint="check its permissions") from error
    except _UNREADABLE as error:
        raise CorruptModel(f"{path}: its table of contents is damaged ({error})", hint=AGAIN) from error
    if kind == "empty":
        raise TruncatedModel(f"{path} is empty", hint=AGAIN)
    if kind == "truncated":
        raise TruncatedModel(f"{path} ends early: its table of contents is missing", hint=AGAIN)
    if kind != "pt2":
        raise ForeignModel(f"{path} is {_FOREIGN[kind]}", hint=_HINTS[kind])
    try:
        with zipfile.ZipFile(path) as archive:
            _inspect_records(path, archive, trust=trust)
    except IkboError:
        raise
    except RecursionError as error:
        raise CorruptModel(f"{path}: a record is nested too deeply", hint=AGAIN) from error
    except _UNREADABLE as error:
        raise CorruptModel(f"{path}: a record cannot be read ({error})", hint=AGAIN) from error


def _inspect_records(path: Path, archive: zipfile.ZipFile, *, trust: bool) -> None:
    broken = archive.testzip()
    if broken is not None:
        raise CorruptModel(f"{path}: the checksum of {broken!r} is wrong", hint=AGAIN)
    root = archive.namelist()[0].partition("/")[0]
    reader = torch._C.PyTorchFileReader(str(path))
    names = _same_records(path, archive, reader, root)
    read = reader.get_record  # what is checked is what torch will see, whatever Python finds under that name

    version = read(ARCHIVE_VERSION_PATH).decode()
    if version != ARCHIVE_VERSION_VALUE:
        raise NewerModel(
            f"{path} has archive version {version[:20]}, the installed torch {torch.__version__} knows "
            f"{ARCHIVE_VERSION_VALUE}",
            hint="install the torch that wrote it, or export the model again with this one",
        )
    for document in _programs(names, read):
        _check_version(path, document)
        if not trust:
            safety.check_program(path, document)
    if not trust:
        safety.check_pickles(path, names, read)


def _same_records(path: Path, archive: zipfile.ZipFile, reader: Any, root: str) -> list[str]:
    """Names of the records without their root folder, after making sure that torch reads the same archive.

    Python and torch look for the table of contents in different ways: a file can be made to show each another one.
    """
    names = []
    for name in archive.namelist():
        folder, _, record = name.partition("/")
        if folder != root or not record:
            raise CorruptModel(f"{path}: the record {name!r} is outside the folder {root!r}", hint=AGAIN)
        names.append(record)
    if len({name.lower() for name in names}) != len(names) or sorted(reader.get_all_records()) != sorted(names):
        raise CorruptModel(f"{path}: its table of contents is ambiguous", hint=AGAIN)
    with open(path, "rb") as file:
        for info, record in zip(archive.infolist(), names, strict=True):
            file.seek(info.header_offset)
            header = file.read(_LOCAL_HEADER)
            start = info.header_offset + len(header) + sum(struct.unpack("<HH", header[-4:]))
            if reader.get_record_offset(record) != start:
                raise CorruptModel(f"{path}: its table of contents is ambiguous at {record!r}", hint=AGAIN)
    return names


def _programs(names: list[str], read: Callable[[str], bytes]) -> Iterator[dict[str, Any]]:
    # torch takes every record of this folder for a program, whatever its suffix.
    for name in names:
        if name.startswith("models/"):
            yield json.loads(read(name).decode())


def programs(path: Path) -> list[dict[str, Any]]:
    """The programs of a `.pt2`, as written: for finding out why torch could not load one."""
    with zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].partition("/")[0]
        names = [name.partition("/")[2] for name in archive.namelist()]
        return list(_programs(names, lambda name: archive.read(f"{root}/{name}")))


def read_manifest(path: str | Path) -> dict[str, Any] | None:
    """The manifest inside a file that `ikbo transform` wrote, without loading the program; None elsewhere."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next((n for n in archive.namelist() if n.partition("/")[2] == f"extra/{MANIFEST}"), None)
            manifest = json.loads(archive.read(name).decode()) if name else None
    except (*_UNREADABLE, RecursionError):
        return None
    return manifest if isinstance(manifest, dict) else None


def _check_version(path: Path, document: dict[str, Any]) -> None:
    major = document["schema_version"]["major"]
    if major > SCHEMA_VERSION[0]:
        raise NewerModel(
            f"{path} has export schema {major}, the installed torch {torch.__version__} knows {SCHEMA_VERSION[0]}",
            hint=f"install the torch that wrote it ({document.get('torch_version', 'newer')}), "
            "or export the model again with this one",
        )
