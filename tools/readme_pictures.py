"""Regenerate the pictures of the README from real runs: `make readme`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from ikbo_cli import api
from ikbo_cli.report import render
from ikbo_cli.results import Declarations

IMAGES = Path(__file__).parent.parent / "docs" / "images"


def picture(name: str, command: str, result: object) -> None:
    """Write one command with its output as an SVG."""
    console = Console(record=True, width=112, highlight=False, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text(f"$ {command}", style="bold cyan"))
    render.show(result, out=console)
    console.save_svg(str(IMAGES / f"{name}.svg"), title="ikbo", unique_id=name)


def main() -> None:
    """Build the demonstration model and run the three commands on it."""
    torch.set_num_threads(1)
    IMAGES.mkdir(parents=True, exist_ok=True)
    user = Declarations(user_inputs=("user_*",))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        api.demo_model("ranker.pt2")
        options = "--user-inputs 'user_*'"
        found = api.analyze("ranker.pt2", declarations=user, threads=1)
        picture("analyze", f"ikbo analyze ranker.pt2 {options}", found)
        made = api.transform("ranker.pt2", "fast.pt2", declarations=user, threads=1)
        picture("transform", f"ikbo transform ranker.pt2 -o fast.pt2 {options}", made)
        proof = api.verify("ranker.pt2", "fast.pt2", threads=1)
        picture("verify", "ikbo verify ranker.pt2 fast.pt2 --threads 1", proof)


if __name__ == "__main__":
    main()
