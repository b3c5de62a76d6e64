"""The collection of public ranking models: `ZOO[name]` builds one, knows its inputs, and exports it.

Weights are random: what is tested is the program, not its predictions.
"""

from __future__ import annotations

import zoo_deepctr
import zoo_recbole
from zoo_base import Model

ZOO: dict[str, Model] = {model.name: model for model in (*zoo_deepctr.MODELS, *zoo_recbole.MODELS)}
