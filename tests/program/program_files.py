"""Files for the tests of `ikbo_cli.program`: a small program, and the same file with records replaced."""

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram


class Ranker(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tower = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        self.head = torch.nn.Linear(8, 1)
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)
        self.shift = torch.randn(8)

    def forward(self, rows, extra, *, weight):
        hidden = self.tower(rows - self.mean) * self.scale + self.shift
        position = torch.arange(rows.shape[0] * 2 + 1)[: rows.shape[0]]
        return {"score": self.head(hidden) * weight, "position": position + extra["offset"]}


def example_inputs(batch: int = 6) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(batch, 4), {"offset": torch.ones(1, dtype=torch.int64)}), {"weight": torch.rand(batch, 1)}


def export_ranker() -> ExportedProgram:
    args, kwargs = example_inputs()
    batch = Dim("batch", min=2, max=4096)
    shapes = {"rows": {0: batch}, "extra": {"offset": None}, "weight": {0: batch}}
    return torch.export.export(Ranker().eval(), args, kwargs, dynamic_shapes=shapes)


def records(path: Path) -> dict[str, bytes]:
    """Records by their name without the root folder."""
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write_records(path: Path, contents: Mapping[str, bytes], root: str = "m") -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in contents.items():
            archive.writestr(f"{root}/{name}", data)


def with_records(source: Path, target: Path, changed: Mapping[str, bytes]) -> Path:
    """A copy of a file, with valid checksums, in which some records are replaced or added."""
    write_records(target, {**records(source), **changed})
    return target


def with_program(source: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a file with its program (`models/model.json`) edited."""
    document = json.loads(records(source)["models/model.json"])
    change(document)
    return with_records(source, target, {"models/model.json": json.dumps(document).encode()})
