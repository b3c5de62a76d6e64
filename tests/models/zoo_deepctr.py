"""Models of `deepctr-torch`, which take one packed float matrix.

A thin wrapper takes user and candidate columns apart, so that they can be declared, and packs them inside.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import threading
from unittest import mock

import torch
from torch import Tensor, nn
from zoo_base import Model, floats, ids

USER_FIELDS, CAND_FIELDS, VOCABULARY, WIDTH, LENGTH = 4, 3, 30, 8, 5


def _library(name: str):
    # On import the library starts a thread that asks the network for newer versions of itself.
    with mock.patch.object(threading.Thread, "start"), contextlib.redirect_stdout(io.StringIO()):
        return importlib.import_module(f"deepctr_torch.{name}")


class Packed(nn.Module):
    """A library model with its packed matrix built from `user_*` and `cand_*`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, user_sparse: Tensor, cand_sparse: Tensor, user_dense: Tensor, cand_dense: Tensor) -> Tensor:
        """Scores `[B, 1]`, or `[B, tasks]`."""
        return self.model(torch.cat([user_sparse.float(), cand_sparse.float(), user_dense, cand_dense], dim=1))


class PackedHistory(nn.Module):
    """A library model over a history of items, with its packed matrix built from `user_*` and `cand_*`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, user_id: Tensor, cand_item: Tensor, user_history: Tensor, user_length: Tensor) -> Tensor:
        """Scores `[B, 1]`."""
        columns = [user_id, cand_item, user_history, user_length.unsqueeze(1)]
        return self.model(torch.hstack([column.float() for column in columns]))


FLAT = {
    "user_sparse": ids(VOCABULARY, USER_FIELDS),
    "cand_sparse": ids(VOCABULARY, CAND_FIELDS),
    "user_dense": floats(3),
    "cand_dense": floats(2),
}
HISTORY = {
    "user_id": ids(VOCABULARY, 1),
    "cand_item": ids(VOCABULARY, 1),
    "user_history": ids(VOCABULARY, LENGTH),
    "user_length": ids(LENGTH + 1, low=1),
}


def _flat(name: str, lists: int = 2, label: str = "", dense: bool = True, **options: object) -> Model:
    def build() -> nn.Module:
        inputs, models = _library("inputs"), _library("models")
        columns = [inputs.SparseFeat(f"f{i}", VOCABULARY, WIDTH) for i in range(USER_FIELDS + CAND_FIELDS)]
        wide = [*columns, inputs.DenseFeat("du", 3), inputs.DenseFeat("dc", 2)]
        return Packed(getattr(models, name)(*[wide, wide if dense else columns][:lists], device="cpu", **options))

    return Model(f"deepctr-torch/{label or name}", build, FLAT, needs=("deepctr_torch",))


def _history(name: str, **options: object) -> Model:
    def build() -> nn.Module:
        inputs, models = _library("inputs"), _library("models")
        item = inputs.SparseFeat("item", VOCABULARY, WIDTH)
        history = inputs.SparseFeat("hist_item", VOCABULARY, WIDTH, embedding_name="item")
        columns = [
            inputs.SparseFeat("user", VOCABULARY, WIDTH),
            item,
            inputs.VarLenSparseFeat(history, LENGTH, length_name="length"),
        ]
        return PackedHistory(getattr(models, name)(columns, ["item"], device="cpu", **options))

    return Model(f"deepctr-torch/{name}", build, HISTORY, needs=("deepctr_torch",))


DEEP = {"dnn_hidden_units": (16, 8)}
TASKS = {"expert_dnn_hidden_units": (16, 8), "gate_dnn_hidden_units": (8,), "tower_dnn_hidden_units": (8,)}
MODELS = [
    _flat("WDL", **DEEP),
    _flat("DeepFM", **DEEP, dnn_use_bn=True),
    _flat("xDeepFM", **DEEP, cin_layer_size=(8, 6)),
    _flat("DCN", **DEEP),
    _flat("DCN", **DEEP, label="DCN-matrix", cross_parameterization="matrix"),
    _flat("DCNMix", **DEEP, num_experts=2, low_rank=4),
    _flat("AutoInt", **DEEP, att_head_num=2),
    _flat("NFM", **DEEP),
    _flat("AFM", dense=False),
    _flat("FiBiNET", **DEEP),
    _flat("FiBiNET", **DEEP, label="FiBiNET-each", bilinear_type="each"),
    _flat("PNN", lists=1, **DEEP),
    _flat("PNN", lists=1, label="PNN-outer", **DEEP, use_outter=True),
    _flat("CCPM", dense=False, conv_kernel_width=(3, 2), conv_filters=(2, 2), dnn_hidden_units=(8,)),
    _flat("ONN", **DEEP),
    _flat("AFN", ltl_hidden_size=16, afn_dnn_hidden_units=(8,)),
    _flat("DIFM", **DEEP),
    _flat("IFM", **DEEP),
    _flat("MLR", lists=1),
    _flat("SharedBottom", lists=1, bottom_dnn_hidden_units=(16, 8), tower_dnn_hidden_units=(8,)),
    _flat("ESMM", lists=1, tower_dnn_hidden_units=(16, 8)),
    _flat("MMOE", lists=1, **TASKS),
    _flat("PLE", lists=1, **TASKS),
    _history("DIN", **DEEP, att_hidden_size=(16, 8)),
]
