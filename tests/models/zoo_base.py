"""What one entry of the collection is: how it is built, what its inputs are, and how it is exported."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

Rows = Callable[[int], Tensor]


def ids(vocabulary: int, *shape: int, low: int = 0) -> Rows:
    """Rows of int64 ids in `[low, vocabulary)`."""
    return lambda rows: torch.randint(low, vocabulary, (rows, *shape))


def floats(*shape: int) -> Rows:
    """Rows of standard normal float32."""
    return lambda rows: torch.randn(rows, *shape)


def masks(length: int) -> Rows:
    """Rows `[length]` of booleans, true for a prefix of at least one."""
    return lambda rows: torch.arange(length) < torch.randint(1, length + 1, (rows, 1))


@dataclass(frozen=True)
class Model:
    """One public model.

    `form` says where its users are: F3, every input has one row per candidate; F1, inputs `user_*` have one row per
    user and `cand_to_user` maps candidates to them; F2, inputs `user_*` have one row, expanded inside.
    """

    name: str
    build: Callable[[], nn.Module]
    fields: Mapping[str, Rows]
    form: str = "F3"
    needs: tuple[str, ...] = field(default=())

    @property
    def user_inputs(self) -> tuple[str, ...]:
        """What is declared on the command line."""
        return ("user_*",) if self.form == "F3" else ()

    def inputs(self, batch: int, users: int) -> dict[str, Tensor]:
        """Valid random inputs by name, in the order of the signature."""
        rows = {"F3": batch, "F1": users, "F2": 1}[self.form]
        made = {name: make(rows if name.startswith("user_") else batch) for name, make in self.fields.items()}
        if self.form == "F1":
            made["cand_to_user"] = torch.randint(0, users, (batch,))
        return made

    def module(self) -> nn.Module:
        """The module with random weights, for inference."""
        torch.manual_seed(0)
        return randomized(self.build())

    def export(self, module: nn.Module | None = None) -> ExportedProgram:
        """The program, dynamic in `B` (and `U`)."""
        batch, users = Dim("B"), Dim("U")
        user_dim = {"F3": {0: batch}, "F1": {0: users}, "F2": None}[self.form]
        inputs = self.inputs(6, 3)
        shapes = {name: user_dim if name.startswith("user_") else {0: batch} for name in inputs}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(module or self.module(), (), inputs, dynamic_shapes=shapes)


def randomized(module: nn.Module) -> nn.Module:
    """Give parameters and running statistics values of ordinary size; library defaults are near zero, or trivial."""
    for parameter in module.parameters():
        fan_in = parameter.shape[-1] if parameter.dim() > 1 else 10
        nn.init.normal_(parameter.data, std=max(0.2, fan_in**-0.5) if parameter.is_floating_point() else 0)
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return module.eval()
