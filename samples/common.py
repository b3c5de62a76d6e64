"""What every sample shares: a fully connected tower, and the command line that writes the file."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

Sample = tuple[nn.Module, dict[str, Tensor], dict[str, Any]]


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def export(build: Callable[..., Sample], **sizes: Any) -> ExportedProgram:
    """Export a sample with its named dynamic dims."""
    torch.manual_seed(0)
    model, inputs, dynamic_shapes = build(**sizes)
    return torch.export.export(model.eval(), (), inputs, dynamic_shapes=dynamic_shapes)


def main(build: Callable[..., Sample], description: str) -> None:
    """`python samples/NAME.py -o model.pt2`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("-o", "--output", required=True, help="path of the .pt2 to write")
    torch.export.save(export(build), parser.parse_args().output)
