"""Looking into a model file without loading it: what it is, whether it is whole, whether loading it would run code."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ikbo_cli.errors import CorruptModel, ForeignModel, ModelNotFound, NewerModel, TruncatedModel, UnsafeModel

MANIFEST = "ikbo.json"
RECIPE = (
    "export the model first: torch.export.save(torch.export.export(model.eval(), args, "
    'dynamic_shapes=...), "model.pt2")'
)
TRUST = "if you trust where the file comes from, give --trust"

_UNREADABLE = (
    zipfile.BadZipFile,
    KeyError,
    EOFError,
    OSError,
    TypeError,
    AttributeError,
    NotImplementedError,
    ValueError,
)

_EXPRESSION_NAMES = {
    "Symbol", "Integer", "Mul", "Add", "Pow", "Float", "Rational", "FloorDiv", "CleanDiv", "CeilDiv", "Mod",
    "PythonMod", "ModularIndexing", "Max", "Min", "Where", "Eq", "Ne", "Gt", "Ge", "Lt", "Le", "Equality",
    "Unequality", "StrictGreaterThan", "GreaterThan", "StrictLessThan", "LessThan", "And", "Or", "Not", "true", "false",
    "BooleanTrue", "BooleanFalse", "IntTrueDiv", "FloatTrueDiv", "TruncToInt", "ToFloat", "RoundToInt", "CeilToInt",
    "FloorToInt", "PowByNatural", "FloatPow", "Abs", "oo", "int_oo", "IntInfinity", "NegativeIntInfinity", "Infinity",
    "NegativeInfinity", "Identity", "LShift", "RShift", "One", "Zero", "NegativeOne", "Half", "True", "False", "sympy",
}  # fmt: skip
_EXPRESSION_NODES = (
    ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.keyword, ast.UnaryOp, ast.USub, ast.BinOp, ast.Add,
    ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Pow, ast.Div, ast.Tuple,
)  # fmt: skip
_GUARD_NODES = (
    *_EXPRESSION_NODES, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.BoolOp, ast.And, ast.Or,
    ast.Not, ast.Subscript, ast.Attribute, ast.Is, ast.IsNot, ast.List,
)  # fmt: skip
_GUARD_NAMES = {"L", "None", "torch", "math", "max", "min", "isinstance", "len"}
_GUARD_ATTRIBUTES = {
    "size",
    "stride",
    "storage_offset",
    "dim",
    "sym_max",
    "sym_min",
    "trunc",
    "ceil",
    "floor",
    "sqrt",
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
        `pt2`, `aoti`, `torchscript`, `state_dict`, `onnx`, `pickle`, `truncated`, `empty` or `unknown`.
    """
    with open(path, "rb") as file:
        head = file.read(64)
    if not head:
        return "empty"
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = [name.partition("/")[2] for name in archive.namelist()]
        if any(name.startswith("data/aotinductor/") for name in names):
            return "aoti"
        if any(name.startswith("models/") and name.endswith(".json") for name in names):
            return "pt2"
        if "constants.pkl" in names or any(name.startswith("code/") for name in names):
            return "torchscript"
        return "state_dict" if "data.pkl" in names else "unknown"
    if head[:4] == b"PK\x03\x04":
        return "truncated"
    if (head[:1] == b"\x08" and b"pytorch" in head) or b"onnx" in head.lower():
        return "onnx"
    return "pickle" if head[:1] == b"\x80" else "unknown"


_FOREIGN = {
    "aoti": "an AOTInductor package: compiled code, from which the program cannot be recovered",
    "torchscript": "a TorchScript file",
    "state_dict": "a file of torch.save (weights or a pickled module), which holds no program",
    "onnx": "an ONNX file",
    "pickle": "a Python pickle, which is never opened",
    "unknown": "no model file that is known",
}


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
        raise ModelNotFound(f"{path}: no such file")
    if path.is_dir():
        raise ForeignModel(f"{path} is a folder", hint="give the path of a .pt2 file")
    try:
        kind = detect_format(path)
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise CorruptModel(f"{path}: not a readable archive ({error})", hint="copy or export the file again") from error
    if kind == "empty":
        raise TruncatedModel(f"{path} is empty", hint="copy or export the file again")
    if kind == "truncated":
        raise TruncatedModel(f"{path} ends early: its table of contents is missing", hint="copy the file again")
    if kind != "pt2":
        raise ForeignModel(f"{path} is {_FOREIGN[kind]}", hint=RECIPE)
    try:
        with zipfile.ZipFile(path) as archive:
            _check_whole(path, archive)
            programs = list(_programs(archive))
            for document in programs:
                _check_version(path, document)
            if not trust:
                _check_safe(path, archive, programs)
    except _UNREADABLE as error:
        raise CorruptModel(
            f"{path}: a record cannot be read ({error})", hint="copy or export the file again"
        ) from error


def read_manifest(path: str | Path) -> dict[str, Any] | None:
    """The manifest inside a file that `ikbo transform` wrote, without loading the program; None elsewhere."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next((n for n in archive.namelist() if n.endswith(f"extra/{MANIFEST}")), None)
            manifest = json.loads(archive.read(name)) if name else None
    except (zipfile.BadZipFile, OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def _check_whole(path: Path, archive: zipfile.ZipFile) -> None:
    broken = archive.testzip()
    if broken is not None:
        raise CorruptModel(f"{path}: the checksum of {broken!r} is wrong", hint="copy or export the file again")


def _programs(archive: zipfile.ZipFile) -> Iterator[dict[str, Any]]:
    for name in archive.namelist():
        _, _, inner = name.partition("/")
        if inner.startswith("models/") and inner.endswith(".json"):
            yield json.loads(archive.read(name))


def _check_version(path: Path, document: dict[str, Any]) -> None:
    from torch._export.serde.schema import SCHEMA_VERSION

    major = document["schema_version"]["major"]
    if major > SCHEMA_VERSION[0]:
        raise NewerModel(
            f"{path} has export schema {major}, the installed torch {torch.__version__} knows {SCHEMA_VERSION[0]}",
            hint=f"install the torch that wrote it ({document.get('torch_version', 'newer')}) or export it again",
        )


def _check_safe(path: Path, archive: zipfile.ZipFile, programs: list[dict[str, Any]]) -> None:
    for document in programs:
        for expression in _strings(document, "expr_str"):
            if not _is_plain(expression, _EXPRESSION_NODES, _EXPRESSION_NAMES, set()):
                raise UnsafeModel(
                    f"{path}: a size expression is not arithmetic, and torch would evaluate it: {expression[:80]!r}",
                    hint=TRUST,
                )
        for guard in document.get("guards_code") or []:
            if not _is_plain(guard, _GUARD_NODES, _GUARD_NAMES, _GUARD_ATTRIBUTES):
                raise UnsafeModel(
                    f"{path}: its guards contain code that torch would execute: {guard[:80]!r}", hint=TRUST
                )
    for name in archive.namelist():
        inner = name.partition("/")[2]
        if inner.startswith("data/sample_inputs/") and not _loads_weights_only(archive.read(name)):
            raise UnsafeModel(f"{path}: its example inputs are a pickle that torch would execute ({inner})", hint=TRUST)
        if inner.startswith("data/constants/custom_obj"):
            raise UnsafeModel(f"{path}: it holds a pickled custom object ({inner})", hint=TRUST)
        if inner.endswith("_config.json") and inner.startswith(("data/weights/", "data/constants/")):
            folder = name.rpartition("/")[0]
            for key, entry in json.loads(archive.read(name))["config"].items():
                if entry.get("use_pickle") and not _loads_weights_only(archive.read(f"{folder}/{entry['path_name']}")):
                    raise UnsafeModel(f"{path}: the tensor {key!r} is a pickle that torch would execute", hint=TRUST)


def _loads_weights_only(payload: bytes) -> bool:
    if not payload:  # no example inputs were saved
        return True
    try:
        torch.load(io.BytesIO(payload), weights_only=True, map_location="meta")
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError):
        return False
    return True


def _strings(document: Any, key: str) -> Iterator[str]:
    if isinstance(document, dict):
        for name, value in document.items():
            if name == key and isinstance(value, str):
                yield value
            else:
                yield from _strings(value, key)
    elif isinstance(document, list):
        for item in document:
            yield from _strings(item, key)


def _is_plain(text: str, nodes: tuple[type, ...], names: set[str], attributes: set[str]) -> bool:
    """Whether an expression is made of the given syntax, names and attributes alone."""
    if not text:
        return True
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError):
        return False
    for node in ast.walk(tree):
        if not isinstance(node, nodes):
            return False
        if isinstance(node, ast.Name) and node.id not in names:
            return False
        if isinstance(node, ast.Attribute) and node.attr not in attributes:
            return False
    return True
