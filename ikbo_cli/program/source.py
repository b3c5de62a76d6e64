"""Where a node comes from in the user's own code."""

from __future__ import annotations

import re

from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def source_location(node: fx.Node) -> str | None:
    """`file.py:123` of the user's own line, skipping frames inside torch; None if nothing was recorded."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in frames if "/torch/" not in file and not file.startswith("<")]
    if not own:
        return None
    file, line = own[-1]
    return f"{file.rpartition('/')[2]}:{line}"


def module_path(node: fx.Node) -> str | None:
    """Path of the innermost module that the node ran in, like `tower.fc1`."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return None
    path = next(reversed(stack.values()))[0]
    if "." not in path and path.startswith("_"):  # a label of export's own passes, no module of the user's
        return None
    path = re.sub(r"^L\['self'\]\.?", "", path)
    return re.sub(r"_modules\['([^']+)'\]", r"\1", path) or None
