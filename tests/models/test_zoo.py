"""Every model of the collection exports with a dynamic batch, and its file computes what the module does."""

import io

import pytest
import torch
from zoo import ZOO


def build(name):
    """The entry, its module, and what it needs."""
    for library in ZOO[name].needs:
        pytest.importorskip(library, reason="needs the models of requirements/models.txt")
    return ZOO[name], ZOO[name].module()


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_exports_saves_and_reloads(name):
    model, module = build(name)
    file = io.BytesIO()
    torch.export.save(model.export(module), file)
    file.seek(0)
    program = torch.export.load(file).module()
    # One library squeezes a batch of one away.
    for batch, users in ((7, 2), (2, 2)):
        inputs = model.inputs(batch, users)
        expected = module(**inputs)
        assert expected.shape[0] == batch if isinstance(expected, torch.Tensor) else expected[0].shape[0] == batch
        torch.testing.assert_close(program(**inputs), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_scores_depend_on_user_and_candidate(name):
    model, module = build(name)
    inputs = model.inputs(64, 16)
    scores = module(**inputs)
    assert scores.isfinite().all()
    for side in ("user_", "cand_"):
        other = model.inputs(64, 16)
        changed = {key: other[key] if key.startswith(side) else value for key, value in inputs.items()}
        assert not torch.allclose(module(**changed), scores), side
