import warnings

import pytest
import torch
from torch.export import Dim
from zoo import ZOO, example

from ikbo_cli import api

pytest.importorskip("deepctr_torch", reason="needs the models of requirements/models.txt")


@pytest.mark.parametrize("name", ZOO)
def test_public_model_through_all_three_commands(name, tmp_path):
    path, out = tmp_path / "model.pt2", tmp_path / "fast.pt2"
    inputs = example(6)
    batch = Dim("B")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(ZOO[name](), (), inputs, dynamic_shapes={k: {0: batch} for k in inputs})
    torch.export.save(exported, path)
    declarations = api.Declarations(user_inputs=("user_*",))
    found = api.analyze(path, declarations=declarations, threads=1)
    assert found.sites
    made = api.transform(path, out, declarations=declarations, policy="always", threads=1)
    assert made.verify.passed
    result = api.verify(path, out, batch=48, users=5, modes=(), threads=1)
    assert result.passed, result.worst
