"""What honest programs contain is accepted; what is only shaped like it is not."""

import collections
import math
from typing import NamedTuple

import pytest
import torch
from torch.export import Dim

from ikbo_cli import program
from ikbo_cli.program import safety


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


torch.utils._pytree._register_namedtuple(Pair, serialized_type_name="ikbo_tests.Pair")


class Calls(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *xs):
        return self.function(*xs)


def sizes(x):
    half = x[: (x.shape[0] + 1) // 2]
    root = x / math.sqrt(x.shape[0])
    return half, root, x[: int(x.shape[0] * 0.5)], x * math.ceil(x.shape[0] / 3), x * (x.shape[0] % 3)


def data_dependent(x, count):
    number = count.item()
    torch._check(number >= 1)
    torch._check(number <= 6)
    return x[:number].sum(), torch.nonzero(x)


def structures(x):
    ordered = collections.OrderedDict(a=x)
    return (
        ordered,
        collections.defaultdict(list, {"q": [x + 1]}),
        Pair(x + 2, x),
        {1: x - 1, "it's": x * 2, "a b": x * 3},
    )


def branches(x):
    return torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,))


def mapped(x):
    return torch.vmap(lambda row: row.sin() + 1)(x)


def contexts(x):
    with torch.no_grad():
        x = x * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x.t()


ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
HONEST = {
    "sizes": (sizes, (ROWS,), ({0: Dim.AUTO},)),
    "data-dependent": (data_dependent, (ROWS, torch.tensor(3)), ({0: Dim("batch", min=2)}, None)),
    "structures": (structures, (ROWS,), ({0: Dim("batch", min=2)},)),
    "branches": (branches, (ROWS,), ({0: Dim("batch", min=2)},)),
    "mapped": (mapped, (ROWS,), ({0: Dim("batch", min=2)},)),
    "contexts": (contexts, (ROWS,), ({0: Dim("batch", min=2)},)),
    "derived": (lambda x: x.view(x.shape[0] // 2, 2, -1), (ROWS,), ({0: 2 * Dim("half", min=2)},)),
    "constants": (
        lambda x, n, text, number: x * n * number,
        (ROWS, 3, "a\"b's\n", 0.5),
        ({0: Dim("batch", min=2)}, None, None, None),
    ),
}


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_honest_programs_are_accepted(name, tmp_path):
    if name == "mapped" and torch.__version__ < (2, 13):
        pytest.skip("torch before 2.13 may not be able to save vmap")
    function, args, shapes = HONEST[name]
    exported = torch.export.export(Calls(function), args, dynamic_shapes={"xs": shapes})
    torch.export.save(exported, str(tmp_path / "m.pt2"))
    loaded = program.load(tmp_path / "m.pt2")
    torch.testing.assert_close(loaded.module()(*args), program.unlifted(exported)(*args), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("text", "harmless"),
    [
        ("Symbol('s27', positive=True, integer=True)", True),
        ("Mul(Integer(2), Symbol('s27', positive=True, integer=True))", True),
        ("FloatPow(ToFloat(Symbol('u0', integer=True)), Float('0.5', precision=53))", True),
        ("Max(1, s27 // 2 - 1)", True),
        ("Max('s27 + 1', 1)", False),
        ("Symbol('s27', positive='True')", False),
        ("Symbol('a b')", False),
        ("Float('s27')", False),
        ("Integer('7')", False),
        ("exit()", False),
        ("Symbol", False),
        ("Max(*[1, 2])", False),
        ("Max(**{})", False),
        ("[1 for _ in range(3)]", False),
        ("s27.__class__", False),
        ("f'{1}'", False),
        ("(x := 1)", False),
        ("", False),
    ],
)
def test_is_arithmetic(text, harmless):
    assert safety.is_arithmetic(text) == harmless


@pytest.mark.parametrize(
    ("text", "harmless"),
    [
        ("L['x'].size()[0] == 2*L['y'].size()[1]", True),
        ("L['args'][0][0].stride()[0] >= 2 and L['n'] == 3", True),
        ("not math.isnan(L['x'])", True),
        ("L['x'].__class__ is None", False),
        ("open('x')", False),
        ("torch.load(L['x'])", False),
        ("[y for y in L]", False),
        ("L['x'] == 1\nimport os", False),
    ],
)
def test_is_plain_guard(text, harmless):
    assert safety.is_plain_guard(text) == harmless


@pytest.mark.parametrize(
    ("target", "harmless"),
    [
        ("torch.ops.aten.linear.default", True),
        ("torch.ops.aten.__and__.Tensor", True),
        ("torch.ops.higher_order.cond", True),
        ("torch.ops.unknown_to_us.op.default", True),  # reported as missing, by name
        ("_operator.floordiv", True),
        ("torch.sym_max", True),
        ("math.trunc", True),
        ("torch.ops.aten.from_file.default", False),
        ("torch.ops.debugprims.load_tensor.default", False),
        ("torch.ops.load_library", False),
        ("torch.ops.aten.linear.__init__", False),
        ("torch.ops.aten.__class__", False),
        ("_operator.methodcaller", False),
        ("torch.os.system", False),
        ("torch.hub.load", False),
        ("builtins.eval", False),
        ("math.__loader__.load_module", False),
    ],
)
def test_is_operator(target, harmless):
    assert safety.is_operator(target) == harmless
