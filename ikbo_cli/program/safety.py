"""Whether loading a program would execute code that the file brings along.

`torch.export.load` turns parts of a file into code: it unpickles, it evaluates size expressions with sympy, it looks
functions up by dotted name, it imports modules named in the input structure, and it writes names into Python source.
Each is checked on the records themselves, before torch sees them.
"""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ikbo_cli.errors import UnsafeModel

TRUST = "if you trust where the file comes from, give --trust"

_SIZE_FUNCTIONS = {
    "Symbol", "Integer", "Float", "Rational", "Mul", "Add", "Pow", "FloorDiv", "CleanDiv", "CeilDiv", "Mod",
    "PythonMod", "ModularIndexing", "Max", "Min", "Where", "Eq", "Ne", "Gt", "Ge", "Lt", "Le", "Equality",
    "Unequality", "StrictGreaterThan", "GreaterThan", "StrictLessThan", "LessThan", "And", "Or", "Not", "IntTrueDiv",
    "FloatTrueDiv", "TruncToInt", "TruncToFloat", "ToFloat", "RoundToInt", "RoundDecimal", "CeilToInt", "FloorToInt",
    "PowByNatural", "FloatPow", "Abs", "Identity", "LShift", "RShift", "IsNonOverlappingAndDenseIndicator",
    "OpaqueUnaryFn_sqrt", "OpaqueUnaryFn_log2", "IntInfinity", "NegativeIntInfinity",
}  # fmt: skip
_SIZE_CONSTANTS = {"true", "false", "oo", "int_oo", "nan", "zoo", "pi", "E"}
_ARITHMETIC = (
    ast.UnaryOp, ast.USub, ast.UAdd, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow,
    ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip
_GUARD_SYNTAX = (
    *_ARITHMETIC, ast.Expression, ast.Load, ast.Call, ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.BoolOp,
    ast.And, ast.Or, ast.Not, ast.Is, ast.IsNot, ast.In, ast.NotIn, ast.List, ast.Tuple,
)  # fmt: skip
_GUARD_NAMES = {"L", "torch", "math", "cast_symbool_to_symint_guardless", "int", "float", "bool", "len", "max", "min"}
_GUARD_ATTRIBUTES = {
    "size", "stride", "storage_offset", "dim", "item", "sym_max", "sym_min", "sym_ite", "sym_not", "sym_float",
    "sym_int", "trunc", "ceil", "floor", "sqrt", "isnan", "isinf", "inf", "nan",
}  # fmt: skip

_PURE_OPERATORS = {
    "abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "index", "inv", "invert", "le", "lshift", "lt",
    "mod", "mul", "ne", "neg", "not_", "or_", "pos", "pow", "rshift", "sub", "truediv", "xor",
}  # fmt: skip
_FUNCTION = re.compile(r"math\.[a-z][a-z0-9]*|torch\._?sym_\w+|torch\._functorch\.predispatch\.\w+|#\w+")
_OPERATOR = re.compile(r"torch\.ops\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)(?:\.([A-Za-z_]\w*))?")
_TOUCHES_FILES = {"aten.from_file", "aten.save", "debugprims.load_tensor"}  # no arithmetic: they open files

_NAME = re.compile(r"\w*")
_PATH = re.compile(r"""[^"'\\\x00-\x1f]*""")  # module paths end up inside quotes in generated source
_NAME_KEYS = {"name", "as_name"}
_PATH_KEYS = {
    "parameter_name", "buffer_name", "tensor_constant_name", "custom_obj_name", "user_input_name", "fqn",
}  # fmt: skip
_FACTORIES = {"list", "dict", "int", "float", "str", "set", "tuple", "bool"}
_RAW_PAYLOAD = re.compile(r"(weight|tensor)_\d+")


def check_program(path: object, document: dict[str, Any]) -> None:
    """Check one program (`models/*.json`).

    Raises:
        UnsafeModel: naming what would be executed.
    """
    for key, text in strings(document):
        if key == "expr_str":
            _require(
                is_arithmetic(text), path, "a size expression is not arithmetic, and torch would evaluate it", text
            )
        elif key == "guards_code":
            _require(is_plain_guard(text), path, "its guards contain code that torch would execute", text)
        elif key in ("target", "as_operator"):
            _require(is_operator(text), path, "it calls a function that is no tensor operator", text)
        elif key in _NAME_KEYS or key == "forward_arg_names":
            _require(bool(_NAME.fullmatch(text)), path, "a name would become code in the generated source", text)
        elif key in _PATH_KEYS:
            _require(bool(_PATH.fullmatch(text)), path, "a module path would become code in the generated source", text)
        elif key in ("in_spec", "out_spec"):
            _require(
                is_plain_structure(text, keywords=key == "in_spec"),
                path,
                "its input structure makes torch import a module",
                text,
            )


def check_pickles(path: object, names: list[str], read: Callable[[str], bytes]) -> None:
    """Check every record that torch would unpickle.

    Args:
        path: Named in the errors.
        names: Records of the archive, without its root folder.
        read: Gives the bytes of a record.

    Raises:
        UnsafeModel: naming the record, or the tensor.
    """
    for name in names:
        if name.startswith("data/sample_inputs/"):
            if not loads_weights_only(read(name)):
                raise UnsafeModel(
                    f"{path}: its example inputs are a pickle that torch would execute ({name})",
                    hint=f"{TRUST}; or save it again without them: exported.example_inputs = None",
                )
        elif name.startswith(("data/weights/", "data/constants/")) and name.endswith(".pt"):
            if not loads_weights_only(read(name)):
                raise UnsafeModel(f"{path}: its tensors are a pickle that torch would execute ({name})", hint=TRUST)
        elif name.startswith(("data/weights/", "data/constants/")) and name.endswith("_config.json"):
            _check_payloads(path, name, read)


def _check_payloads(path: object, name: str, read: Callable[[str], bytes]) -> None:
    folder = name.rpartition("/")[0]
    for key, entry in json.loads(read(name).decode())["config"].items():
        payload = entry["path_name"]
        if not _RAW_PAYLOAD.fullmatch(payload):
            raise UnsafeModel(f"{path}: the constant {key!r} is a pickled object ({payload[:80]})", hint=TRUST)
        if entry.get("use_pickle") and not loads_weights_only(read(f"{folder}/{payload}")):
            raise UnsafeModel(f"{path}: the tensor {key!r} is a pickle that torch would execute", hint=TRUST)


def _require(harmless: bool, path: object, message: str, text: str) -> None:
    if not harmless:
        raise UnsafeModel(f"{path}: {message}: {text[:80]!r}", hint=TRUST)


def strings(document: Any) -> Iterator[tuple[str, str]]:
    """All strings of a JSON value with the key that they stand under; those of a list have the key of the list."""
    pending: list[tuple[str, Any]] = [("", document)]
    while pending:
        key, value = pending.pop()
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, dict):
            pending.extend(value.items())
        elif isinstance(value, list):
            pending.extend((key, item) for item in value)


def loads_weights_only(payload: bytes) -> bool:
    """Whether torch reads these bytes without its full unpickler; nothing in them is executed."""
    if not payload:  # nothing was saved
        return True
    try:
        torch.load(io.BytesIO(payload), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, AttributeError, TypeError, ValueError):
        return False
    return True


def is_arithmetic(text: str) -> bool:
    """Whether a size expression, as `sympy.srepr` prints it, is made of numbers, symbols and arithmetic alone.

    Strings count only as the name of a `Symbol` or the digits of a `Float`: sympy evaluates any other string.
    """
    tree = _parse(text)
    return tree is not None and _is_arithmetic(tree)


def _is_arithmetic(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=value):
            return isinstance(value, (bool, int, float))
        case ast.Name(id=name):
            return name in _SIZE_CONSTANTS or _SYMBOL.fullmatch(name) is not None
        case ast.Call(func=ast.Name(id=("Symbol" | "Float") as name), args=[ast.Constant(value=str(first))]):
            pattern = _SYMBOL_NAME if name == "Symbol" else _DIGITS
            return pattern.fullmatch(first) is not None and all(_is_arithmetic(k.value) for k in node.keywords)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            values = [*args, *(keyword.value for keyword in keywords)]
            return name in _SIZE_FUNCTIONS and all(map(_is_arithmetic, values))
        case ast.Tuple(elts=items):
            return all(map(_is_arithmetic, items))
        case ast.UnaryOp() | ast.BinOp() | ast.Compare():
            return all(isinstance(child, _ARITHMETIC) or _is_arithmetic(child) for child in ast.iter_child_nodes(node))
    return False


_SYMBOL = re.compile(r"[a-z]{1,5}\d+")  # s27, u0, zf1: what torch calls its sizes
_SYMBOL_NAME = re.compile(r"_?[A-Za-z]\w*")  # files of other versions may use others
_DIGITS = re.compile(r"[-+0-9.eE]+|inf|-inf|nan")


def is_plain_guard(text: str) -> bool:
    """Whether a guard only compares sizes and values of the inputs."""
    tree = _parse(text)
    if tree is None:
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in _GUARD_NAMES:
            return False
        if isinstance(node, ast.Attribute) and node.attr not in _GUARD_ATTRIBUTES:
            return False
        if not isinstance(node, _GUARD_SYNTAX):
            return False
    return True


def _parse(text: str) -> ast.AST | None:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def is_operator(target: str) -> bool:
    """Whether a call target is a registered operator, or arithmetic on sizes; an unregistered one passes."""
    if target.startswith("_operator."):
        return target.removeprefix("_operator.") in _PURE_OPERATORS
    parts = _OPERATOR.fullmatch(target)
    if parts is None:
        return _FUNCTION.fullmatch(target) is not None
    found = resolve(target)
    known = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)
    return f"{parts[1]}.{parts[2]}" not in _TOUCHES_FILES and (found is None or isinstance(found, known))


def resolve(target: str) -> object | None:
    """The object that torch would call for `torch.ops.<namespace>.<name>.<overload>`; None if there is none."""
    found: object = torch
    for part in target.split(".")[1:]:
        try:
            found = getattr(found, part)
        except AttributeError:
            return None
    return found


def missing_operator(document: dict[str, Any]) -> str | None:
    """The first operator of a program that this process does not know, as `namespace::name`."""
    for key, text in strings(document):
        if key == "target" and (parts := _OPERATOR.fullmatch(text)) and resolve(text) is None:
            return f"{parts[1]}::{parts[2]}" + (f".{parts[3]}" if parts[3] and parts[3] != "default" else "")
    return None


def is_plain_structure(text: str, *, keywords: bool = False) -> bool:
    """Whether an input or output structure (a serialized pytree) makes torch import nothing.

    With `keywords` the names of keyword inputs are checked too: they are written into the source of `forward`.
    """
    if not text:
        return True
    try:
        _, tree = json.loads(text)
    except (ValueError, TypeError):
        return False
    pending = [tree]
    while pending:
        node = pending.pop()
        if not isinstance(node, dict) or not isinstance(node.get("children_spec"), list):
            return False
        pending.extend(node["children_spec"])
        context = node.get("context")
        if node.get("type") == "collections.defaultdict":
            if not isinstance(context, dict) or context.get("default_factory_module") != "builtins":
                return False
            if context.get("default_factory_name") not in _FACTORIES:
                return False
        if _names_an_enum(context):
            return False
    return not keywords or all(_NAME.fullmatch(name) for name in _keywords(tree))


def _names_an_enum(context: Any) -> bool:
    if isinstance(context, str):
        try:
            context = json.loads(context)
        except ValueError:
            return False
    pending = [context]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if "__enum__" in value:
                return True
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
    return False


def _keywords(tree: dict[str, Any]) -> list[str]:
    children = tree["children_spec"]
    if len(children) != 2 or children[1].get("type") != "builtins.dict":
        return []
    context = children[1]["context"]
    return [str(name) for name in (json.loads(context) if isinstance(context, str) else context or [])]
