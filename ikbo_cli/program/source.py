"""Where a node comes from in the user's own code."""

from __future__ import annotations

import re

from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
# A folder of the user's own may be called torch: only the installed package is skipped.
_TORCH = re.compile(r"(^|[\\/](site|dist)-packages[\\/])torch[\\/]|^<")


def source_location(node: fx.Node) -> str | None:
    """`file.py:123` of the user's own line, skipping frames inside torch; None if nothing was recorded."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in frames if not _TORCH.search(file)]
    if not own:
        return None
    file, line = own[-1]
    name = re.split(r"[\\/]", file)[-1]
    return f"{name}:{line}"


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
