"""Models of `recbole`, through a thin wrapper that scores (user or history, candidate) pairs.

The library builds its models from a data set; a description of one with a few fields is enough.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from zoo_base import Model, ids

USERS, ITEMS, LENGTH = 20, 40, 6
USER_FIELDS = ("user_id", "user_age", "user_gender")
CAND_FIELDS = ("cand_id", "cand_genre")
SMALL = {
    "embedding_size": 8,
    "hidden_size": 8,
    "inner_size": 16,
    "mlp_hidden_size": [16, 8],
    "mf_embedding_size": 8,
    "mlp_embedding_size": 8,
    "user_embedding_size": 8,
    "item_embedding_size": 8,
    "user_hidden_size_list": [16, 8],
    "item_hidden_size_list": [16, 8],
    "cnn_channels": [1, 4, 4],
    "cnn_kernels": [4, 2],
    "cnn_strides": [4, 2],
    "low_rank": 4,
    "expert_num": 2,
    "cin_layer_size": [8, 6],
    "order_list": [6],
    "weight_size": 8,
    "prototype_size": 10,
    "k_interests": 3,
    "t_cin": [8, 6],
    "nh": 2,
    "history_len": LENGTH,
}
NAMES = {
    "USER_ID_FIELD": "user_id",
    "ITEM_ID_FIELD": "cand_id",
    "LIST_SUFFIX": "_list",
    "ITEM_LIST_LENGTH_FIELD": "user_length",
    "NEG_PREFIX": "neg_",
    "MAX_ITEM_LIST_LENGTH": LENGTH,
    "LABEL_FIELD": "label",
    "RATING_FIELD": "rating",
    "INVERSE_ITEM_SEQ": "inverse_cand_id_list",
    "train_neg_sample_args": {"sample_num": 1},
    "device": torch.device("cpu"),
    "numerical_features": [],
    "train_batch_size": 8,
}


class Config(dict):
    """Options by key or by attribute; one that is not given is None."""

    __getattr__ = dict.__getitem__

    def __missing__(self, key: str) -> None:
        return None

    def __deepcopy__(self, memo: object) -> Config:
        return Config(self)

    @property
    def final_config_dict(self) -> Config:
        return self


class Fields(nn.Module):
    """A context-aware model on its fields: the library takes a mapping of them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, user_id: Tensor, user_age: Tensor, user_gender: Tensor, cand_id: Tensor, cand_genre: Tensor
    ) -> Tensor:
        """Scores `[B]`."""
        values = (user_id, user_age, user_gender, cand_id, cand_genre)
        return self.model.predict(dict(zip(USER_FIELDS + CAND_FIELDS, values, strict=True)))


class History(nn.Module):
    """A sequential model on a user, a history with its length, and a candidate."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, user_id: Tensor, user_history: Tensor, user_length: Tensor, cand_id: Tensor) -> Tensor:
        """Scores `[B]`."""
        return self.model.predict(
            {
                "user_id": user_id,
                "cand_id": cand_id,
                "cand_id_list": user_history,
                "inverse_cand_id_list": user_history.flip(1),
                "neg_cand_id_list": user_history,
                "user_length": user_length,
            }
        )


class Pair(nn.Module):
    """A collaborative model on a user and a candidate."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, user_id: Tensor, cand_id: Tensor) -> Tensor:
        """Scores `[B]`."""
        return self.model.predict({"user_id": user_id, "cand_id": cand_id})


class Interactions(dict):
    """Feature columns by name, as the library's own class holds them."""

    @property
    def interaction(self) -> dict[str, Tensor]:
        return self

    def to(self, device: object) -> Interactions:
        return self


class TinyData:
    """What the models ask of a data set: its fields, their sizes, and who interacted with what."""

    user_num, item_num = USERS, ITEMS

    def __init__(self, config: Config) -> None:
        kind = importlib.import_module("recbole.utils").FeatureType
        self.config = config
        self.sizes = {
            "user_id": USERS,
            "user_age": 7,
            "user_gender": 3,
            "cand_id": ITEMS,
            "cand_genre": 9,
        }
        self.field2type = dict.fromkeys(self.sizes, kind.TOKEN)
        self.field2seqlen = {"cand_id_list": LENGTH}
        generator = torch.Generator().manual_seed(0)
        self._draw = lambda high, *shape: torch.randint(1, high, shape, generator=generator)

    def fields(self, source: list[Any]) -> list[str]:
        users = any("user" in str(s.value) for s in source)
        items = any("item" in str(s.value) for s in source)
        return list(USER_FIELDS * users + CAND_FIELDS * items)

    def num(self, name: str) -> int:
        return self.sizes[name]

    def get_user_feature(self) -> Interactions:
        columns = {name: self._draw(self.sizes[name], USERS) for name in USER_FIELDS[1:]}
        return Interactions(user_id=torch.arange(USERS), **columns)

    def get_item_feature(self) -> Interactions:
        return Interactions(cand_id=torch.arange(ITEMS), cand_genre=self._draw(self.sizes["cand_genre"], ITEMS))

    def history_item_matrix(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor, Tensor]:
        return self._draw(ITEMS, USERS, LENGTH), torch.ones(USERS, LENGTH), self._draw(LENGTH + 1, USERS)

    def history_user_matrix(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor, Tensor]:
        return self._draw(USERS, ITEMS, LENGTH), torch.ones(ITEMS, LENGTH), self._draw(LENGTH + 1, ITEMS)

    def inter_matrix(self, form: str) -> Any:
        sparse = importlib.import_module("scipy.sparse")
        return sparse.random(USERS, ITEMS, density=0.3, format=form, random_state=0)


def _model(wrapper: type[nn.Module], inputs: dict[str, Any], kind: str, name: str, **options: object) -> Model:
    def build() -> nn.Module:
        yaml = importlib.import_module("yaml")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(f"recbole.model.{kind}_recommender.{name.lower()}")
        defaults = Path(importlib.import_module("recbole").__file__).parent / "properties" / "model" / f"{name}.yaml"
        given = yaml.safe_load(defaults.read_text()) or {}
        # YAML reads `1e-12` as text.
        given = {key: float(value) if key == "layer_norm_eps" else value for key, value in given.items()}
        config = Config({**given, **NAMES})
        config.update({key: value for key, value in SMALL.items() if key in given})
        config.update(options)
        return wrapper(getattr(module, name)(config, TinyData(config)))

    return Model(f"recbole/{name}", build, inputs, needs=("recbole",))


FIELD_INPUTS = {
    "user_id": ids(USERS),
    "user_age": ids(7),
    "user_gender": ids(3),
    "cand_id": ids(ITEMS),
    "cand_genre": ids(9),
}
HISTORY_INPUTS = {
    "user_id": ids(USERS),
    "user_history": ids(ITEMS, LENGTH, low=1),
    "user_length": ids(LENGTH + 1, low=1),
    "cand_id": ids(ITEMS),
}
PAIR_INPUTS = {"user_id": ids(USERS), "cand_id": ids(ITEMS)}


def _context(name: str, **options: object) -> Model:
    return _model(Fields, FIELD_INPUTS, "context_aware", name, **options)


def _sequential(name: str, **options: object) -> Model:
    return _model(History, HISTORY_INPUTS, "sequential", name, **options)


def _general(name: str, **options: object) -> Model:
    return _model(Pair, PAIR_INPUTS, "general", name, **options)


_FFM = {"fields": {0: list(USER_FIELDS), 1: list(CAND_FIELDS)}}
CONTEXT = (
    "AFM", "AutoInt", "DCN", "DCNV2", "DeepFM", "DSSM", "EulerNet", "FiGNN", "FM", "FNN", "KD_DAGFM", "LR", "NFM",
    "PNN", "WideDeep", "xDeepFM",
)  # fmt: skip
# Left out because torch.export refuses them: DIEN, BERT4Rec, HRM, SHAN, SRGNN (loops over values, or numpy inside).
SEQUENTIAL = (
    "DIN", "GRU4Rec", "SASRec", "NARM", "Caser", "STAMP", "SINE", "HGN", "NextItNet", "LightSANs", "CORE", "NPE",
    "FPMC", "TransRec", "FOSSIL",
)  # fmt: skip
GENERAL = ("BPR", "NeuMF", "DMF", "ConvNCF", "FISM", "NAIS", "SimpleX")
MODELS = [
    *map(_context, CONTEXT),
    _context("FFM", **_FFM),
    _context("FwFM", **_FFM),
    *map(_sequential, SEQUENTIAL),
    *map(_general, GENERAL),
]
