import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "ikbo_cli"
ORDER = ["results", "errors", "program", "broadcast", "cost", "transform", "analyze", "verify", "api", "report", "cli"]
FILES = sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found.update(names)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    mine = room(path)
    for name in imported(path):
        if not name.startswith("ikbo_cli."):
            continue
        other = name.split(".")[1]
        if mine in ORDER and other in ORDER and other != mine:
            assert ORDER.index(other) < ORDER.index(mine), f"{mine} imports {other}"
        if mine == "kernels":
            assert other in ("kernels", "errors"), f"kernels import {other}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_report_imports_rich(path):
    if room(path) != "report":
        assert not any(name.split(".")[0] == "rich" for name in imported(path))


def test_command_line_imports_without_torch():
    code = "import sys, ikbo_cli.cli.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
