"""Every model of the collection goes through all three commands."""

import pytest
import torch
from zoo import ZOO

from ikbo_cli import api


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_public_model_through_all_three_commands(name, tmp_path):
    model = ZOO[name]
    for library in model.needs:
        pytest.importorskip(library, reason="needs the models of requirements/models.txt")
    path, out = tmp_path / "model.pt2", tmp_path / "fast.pt2"
    torch.export.save(model.export(), path)
    declarations = api.Declarations(user_inputs=model.user_inputs)
    found = api.analyze(path, declarations=declarations, threads=1)
    assert found.sites
    made = api.transform(path, out, declarations=declarations, policy="always", threads=1)
    assert made.verify.passed
    result = api.verify(path, out, batch=48, users=5, modes=(), threads=1)
    assert result.passed, result.worst
