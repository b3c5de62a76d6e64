"""Public ranking models from `deepctr-torch`, behind a thin wrapper with separate user and candidate inputs.

The library takes one packed float matrix; the wrapper concatenates its columns inside, so that user inputs can be
declared (form F3). Weights are random: what is tested is the program, not its predictions.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

SPARSE_ONLY = ("AFM", "CCPM")
USER_FIELDS, CAND_FIELDS, VOCABULARY, WIDTH = 4, 3, 30, 8


class Packed(nn.Module):
    """A library model with its packed matrix built from `user_sparse`, `cand_sparse`, `user_dense` and `cand_dense`."""

    def __init__(self, model: nn.Module, *, dense: bool) -> None:
        super().__init__()
        self.model, self.dense = model, dense

    def forward(self, user_sparse: Tensor, cand_sparse: Tensor, user_dense: Tensor, cand_dense: Tensor) -> Tensor:
        """Scores `[B, 1]`."""
        dense = [user_dense, cand_dense] if self.dense else []
        return self.model(torch.cat([user_sparse.float(), cand_sparse.float(), *dense], dim=1))


def _deepctr(name: str, **options: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        inputs = importlib.import_module("deepctr_torch.inputs")
        models = importlib.import_module("deepctr_torch.models")
        fields = [inputs.SparseFeat(f"f{i}", VOCABULARY, WIDTH) for i in range(USER_FIELDS + CAND_FIELDS)]
        dense = [] if name in SPARSE_ONLY else [inputs.DenseFeat("du", 3), inputs.DenseFeat("dc", 2)]
        fields += dense
        torch.manual_seed(0)
        both = (fields,) if name == "PNN" else (fields, fields)
        model = getattr(models, name)(*both, device="cpu", **options)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
        return Packed(model, dense=bool(dense)).eval()

    return build


ZOO: dict[str, Callable[[], nn.Module]] = {
    name: _deepctr(name, **options)
    for name, options in {
        "WDL": {"dnn_hidden_units": (16, 8)},
        "DeepFM": {"dnn_hidden_units": (16, 8)},
        "xDeepFM": {"dnn_hidden_units": (16, 8), "cin_layer_size": (8, 6)},
        "DCN": {"dnn_hidden_units": (16, 8)},
        "DCNMix": {"dnn_hidden_units": (16, 8), "num_experts": 2, "low_rank": 4},
        "AutoInt": {"dnn_hidden_units": (16, 8), "att_head_num": 2},
        "NFM": {"dnn_hidden_units": (16, 8)},
        "AFM": {},
        "FiBiNET": {"dnn_hidden_units": (16, 8)},
        "PNN": {"dnn_hidden_units": (16, 8)},
        "CCPM": {"conv_kernel_width": (3, 2), "conv_filters": (2, 2), "dnn_hidden_units": (8,)},
        "ONN": {"dnn_hidden_units": (16, 8)},
        "AFN": {"ltl_hidden_size": 16, "afn_dnn_hidden_units": (8,)},
        "DIFM": {"dnn_hidden_units": (16, 8)},
        "IFM": {"dnn_hidden_units": (16, 8)},
    }.items()
}


def example(rows: int) -> dict[str, Tensor]:
    """Valid inputs with `rows` rows."""
    return {
        "user_sparse": torch.randint(0, VOCABULARY, (rows, USER_FIELDS)),
        "cand_sparse": torch.randint(0, VOCABULARY, (rows, CAND_FIELDS)),
        "user_dense": torch.randn(rows, 3),
        "cand_dense": torch.randn(rows, 2),
    }
