import pytest
import torch
from torch import nn
from torch.export import Dim

from ikbo_cli.verify import run_reference, verify_modules
from ikbo_cli.verify.cases import ratio_cases

MANIFEST = {
    "inputs": [
        {"name": "user", "original": "user", "compact": True, "side": "user"},
        {"name": "cand", "original": "cand", "compact": False, "side": "candidate"},
        {"name": "cand_to_user_index", "original": None, "compact": False, "side": "index"},
    ],
    "rounded_partials": True,
}


class Original(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(24, 8)

    def forward(self, user, cand):
        return torch.relu(self.fc(torch.cat([user, cand], 1)))


class Split(nn.Module):
    """The linear of `Original`, split by hand; `fault` breaks it in one way."""

    def __init__(self, original, fault=None):
        super().__init__()
        self.fc, self.fault = original.fc, fault

    def forward(self, user, cand, cand_to_user_index):
        index = cand_to_user_index
        if self.fault == "shifted":
            index = (index + 1) % user.shape[0]
        if self.fault == "swapped":
            user = user.flip(0)
        w = self.fc.weight
        compact = nn.functional.linear(user.float(), w[:, :16].float(), self.fc.bias.float())
        out = torch.relu((nn.functional.linear(cand, w[:, 16:]) + compact.index_select(0, index)).to(cand.dtype))
        if self.fault == "nan":
            out = torch.where(out == out.amax(), float("nan"), out)
        if self.fault == "one row":
            first = (torch.arange(out.shape[0]) == 0).to(out.dtype)
            out = out + 0.01 * first[:, None]
        return out


def modules(dtype, fault=None):
    original = Original().to(dtype).eval()
    batch, users = Dim("B"), Dim("U")
    args = {"user": torch.randn(6, 16, dtype=dtype), "cand": torch.randn(6, 8, dtype=dtype)}
    first = torch.export.export(original, (), args, dynamic_shapes={k: {0: batch} for k in args})
    new = {**args, "user": torch.randn(3, 16, dtype=dtype), "cand_to_user_index": torch.zeros(6, dtype=torch.int64)}
    shapes = {"user": {0: users}, "cand": {0: batch}, "cand_to_user_index": {0: batch}}
    second = torch.export.export(Split(original, fault), (), new, dynamic_shapes=shapes)
    return first.module(check_guards=False), second.module(check_guards=False)


def run(first, second):
    return verify_modules(first, second, MANIFEST, original_path="a", optimized_path="b", batch=64, users=5, modes=())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_correct_split_passes(dtype):
    result = run(*modules(dtype))
    assert result.passed, result.worst
    assert len(result.cases) == len(ratio_cases(64, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", ["shifted", "swapped", "nan", "one row"])
def test_faults_are_caught(fault, dtype):
    result = run(*modules(dtype, fault))
    assert not result.passed
    assert result.worst


def test_index_of_every_case_is_valid():
    for case in ratio_cases(1024, 15):
        index = case.index(torch.Generator().manual_seed(0))
        assert len(index) == case.batch
        assert 0 <= int(index.min()) <= int(index.max()) < case.users


class Everything(nn.Module):
    """Ops that stop `.double()`: casts, dtype arguments, a recurrent layer, attention, in-place ops."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids):
        x = self.table(ids).float()
        x = x + torch.zeros(x.shape, dtype=torch.float32)
        x, _ = self.gru(x)
        x = nn.functional.scaled_dot_product_attention(x, x, x)
        return self.norm(x).relu_().sum(-1).to(torch.float32)


def test_reference_lifts_what_double_cannot():
    model = Everything().eval()
    module = torch.export.export(model, (torch.randint(0, 10, (4, 5)),)).module(check_guards=False)
    ids = torch.randint(0, 10, (4, 5))
    (truth,) = run_reference(module, [ids])
    assert truth.dtype == torch.float64
    torch.testing.assert_close(truth.float(), model(ids), rtol=1e-4, atol=1e-5)
