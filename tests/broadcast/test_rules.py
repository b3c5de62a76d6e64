import itertools

import pytest
import torch

from ikbo_cli.broadcast import Broadcast, Concat, EagerContext, Full, Sum, Uniform, load_rules
from ikbo_cli.broadcast.maps import Map
from ikbo_cli.broadcast.registry import RULES, Rule

aten = torch.ops.aten
INDEX = torch.tensor([2, 0, 0, 1, 2])  # unsorted; B=5, U=3
B, U = 5, 3


def context():
    load_rules()
    return EagerContext()


def broadcast(ctx, shape, dim):
    size = list(shape)
    size[dim] = U
    return Broadcast(torch.randn(size, dtype=torch.float64), Map((ctx.gather_step(INDEX),)), dim, source="user")


def full(*shape):
    return Full(torch.randn(shape, dtype=torch.float64))


def assert_commutes(ctx, op, *args, **kwargs):
    """materialize(rule(values)) == op(materialize(values)), in float64; returns the rule's result."""
    plain = EagerContext()
    written = [plain.written(a) for a in args]
    written = [a.node if isinstance(a, Full) else a for a in written]
    truth = op(*written, **kwargs)
    result = ctx.apply(op, *args, **kwargs)
    pairs = zip(result, truth, strict=True) if isinstance(truth, (list, tuple)) else [(result, truth)]
    for value, tensor in pairs:
        got = ctx.materialize(value)
        assert got.shape == tensor.shape
        assert not torch.equal(tensor, tensor.new_zeros(tensor.shape)), "uninformative sample"
        torch.testing.assert_close(got, tensor, rtol=1e-9, atol=1e-9)
    return result


# op, shape of the broadcast operand, further arguments, candidate axes on which the result stays compact
SHAPE = (B, B, B)
AXIS_OPS = [
    (aten.relu.default, (), {0, 1, 2}),
    (aten.sum.dim_IntList, ([1],), {0, 2}),
    (aten.sum.dim_IntList, ([-1], True), {0, 1}),
    (aten.mean.dim, ([1, 2],), {0}),
    (aten.amax.default, ([2],), {0, 1}),
    (aten.max.dim, (1,), {0, 2}),
    (aten.softmax.int, (-1,), {0, 1}),
    (aten.cumsum.default, (1,), {0, 2}),
    (aten.sort.default, (2,), {0, 1}),
    (aten.topk.default, (2, 1), {0, 2}),
    (aten.layer_norm.default, ([B],), {0, 1}),
    (aten.permute.default, ([2, 0, 1],), {0, 1, 2}),
    (aten.transpose.int, (0, 2), {0, 1, 2}),
    (aten.unsqueeze.default, (1,), {0, 1, 2}),
    (aten.select.int, (1, 2), {0, 2}),
    (aten.slice.Tensor, (2, 1, 4), {0, 1}),
    (aten.flip.default, ([1],), {0, 2}),
    (aten.split.Tensor, (2, 1), {0, 2}),
    (aten.unbind.int, (1,), {0, 2}),
]


@pytest.mark.parametrize(("op", "args", "compact"), AXIS_OPS, ids=[str(row[0]) for row in AXIS_OPS])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_axis_ops_on_every_candidate_axis(op, args, compact, dim):
    shape = list(SHAPE)
    shape[dim] = B
    ctx = context()
    x = broadcast(ctx, shape, dim)
    result = assert_commutes(ctx, op, x, *args)
    first = result[0] if isinstance(result, list) else result
    assert isinstance(first, Broadcast) == (dim in compact)


@pytest.mark.parametrize(("left", "right"), list(itertools.product([0, 1], repeat=2)))
@pytest.mark.parametrize("op", [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.maximum.default])
def test_pointwise_pairs(op, left, right):
    ctx = context()
    x, y = broadcast(ctx, (5, 5), left), broadcast(ctx, (5, 5), right)
    result = assert_commutes(ctx, op, x, y)
    assert isinstance(result, Broadcast) == (left == right)


@pytest.mark.parametrize("other", [(1, 4), (4,), (1, 1), ()])
def test_operand_without_rows_keeps_the_claim(other):
    ctx = context()
    result = assert_commutes(ctx, aten.mul.Tensor, broadcast(ctx, (B, 4), 0), full(*other))
    assert isinstance(result, Broadcast)


def test_parameter_with_rows_breaks_the_claim():
    ctx = context()
    weight = Uniform(torch.randn(B, 1, dtype=torch.float64))
    assert not isinstance(assert_commutes(ctx, aten.mul.Tensor, broadcast(ctx, (B, 4), 0), weight), Broadcast)


VIEWS = [
    ((B, 4, 6), 0, [B, 24], 0, 1),
    ((B, 4, 6), 0, [-1, 24], 0, 1),
    ((B, 4, 6), 0, [B * 4, 6], 0, 4),
    ((B, 4, 6), 0, [B, 2, 2, 6], 0, 1),
    ((4, B, 6), 1, [4, B * 6], 1, 6),
    ((4, B, 6), 1, [1, 4, B, 2, 3], 2, 1),
]


@pytest.mark.parametrize(("shape", "dim", "size", "new_dim", "mult"), VIEWS)
def test_view_keeps_rows(shape, dim, size, new_dim, mult):
    ctx = context()
    result = assert_commutes(ctx, aten.reshape.default, broadcast(ctx, shape, dim), size)
    assert (result.dim, result.mult) == (new_dim, mult)


def test_view_that_buries_the_candidate_axis_is_written():
    ctx = context()
    assert isinstance(assert_commutes(ctx, aten.reshape.default, broadcast(ctx, (4, B, 6), 1), [4 * B, 6]), Full)


def test_flattened_rows_split_again():
    ctx = context()
    flat = ctx.apply(aten.reshape.default, broadcast(ctx, (B, 4, 6), 0), [B * 4, 6])
    back = assert_commutes(ctx, aten.reshape.default, flat, [B, 4, 6])
    assert (back.dim, back.mult) == (0, 1)


@pytest.mark.parametrize("dim", [1, 2])
def test_concat_views_and_linear(dim):
    ctx = context()
    parts = [broadcast(ctx, (B, 2, 4), 0), full(B, 2, 4), broadcast(ctx, (B, 2, 4), 0)]
    x = ctx.apply(aten.cat.default, parts, dim)
    assert isinstance(x, Concat)
    flat = assert_commutes(ctx, aten.reshape.default, x, [B, 24])
    weight = Uniform(torch.randn(3, 24, dtype=torch.float64))
    bias = Uniform(torch.randn(3, dtype=torch.float64))
    result = assert_commutes(ctx, aten.linear.default, flat, weight, bias)
    assert isinstance(result, Sum)
    assert len(result.terms) == 2, "one term for the compact side, one for the candidates"


@pytest.mark.parametrize("op", [aten.sum.dim_IntList, aten.mean.dim])
def test_sum_over_fields_is_split(op):
    ctx = context()
    x = ctx.apply(aten.cat.default, [broadcast(ctx, (B, 3, 4), 0), full(B, 2, 4)], 1)
    assert isinstance(assert_commutes(ctx, op, x, [1]), Sum)


def test_compression_from_the_left():
    ctx = context()
    x = ctx.apply(aten.cat.default, [broadcast(ctx, (B, 3, 4), 0), full(B, 2, 4)], 1)
    weight = Uniform(torch.randn(6, 5, dtype=torch.float64))
    assert isinstance(assert_commutes(ctx, aten.matmul.default, weight, x), Sum)


@pytest.mark.parametrize("steps", [1, 3])
def test_grouped_matmul(steps):
    ctx = context()
    keys = broadcast(ctx, (B, 4, 6), 0)
    result = assert_commutes(ctx, aten.bmm.default, full(B, steps, 4), keys)
    assert isinstance(result, Full)
    assert ctx.sites[""].code == "IKB104"


def test_grouped_matmul_with_heads_folded_into_rows():
    ctx = context()
    keys = ctx.apply(aten.reshape.default, broadcast(ctx, (B, 2, 4, 6), 0), [B * 2, 4, 6])
    assert_commutes(ctx, aten.bmm.default, full(B * 2, 3, 4), keys)


@pytest.mark.parametrize("mask", [None, "user", "candidate"])
def test_target_attention(mask):
    ctx = context()
    keys, values = broadcast(ctx, (B, 2, 7, 4), 0), broadcast(ctx, (B, 2, 7, 4), 0)
    extra = {None: None, "user": broadcast(ctx, (B, 1, 1, 7), 0), "candidate": full(B, 1, 1, 7)}[mask]
    assert_commutes(ctx, aten.scaled_dot_product_attention.default, full(B, 2, 3, 4), keys, values, extra)
    assert ctx.sites[""].code == "IKB103"


def test_coarser_level_is_taken_to_the_finer_one():
    ctx = context()
    to_vendor = ctx.gather_step(torch.tensor([1, 0, 1, 0]))
    to_item = ctx.gather_step(torch.tensor([3, 0, 2, 2, 1]))
    user = Broadcast(torch.randn(2, 3, dtype=torch.float64), Map((to_vendor, to_item)), 0, source="user")
    vendor = Broadcast(torch.randn(4, 3, dtype=torch.float64), Map((to_item,)), 0, source="vendor")
    result = assert_commutes(ctx, aten.mul.Tensor, user, vendor)
    assert isinstance(result, Broadcast)
    assert result.map.steps == (to_item,)


def test_different_indexes_do_not_combine():
    ctx = context()
    other = Map((ctx.gather_step(torch.tensor([0, 1, 2, 0, 1])),))
    y = Broadcast(torch.randn(U, 4, dtype=torch.float64), other, 0, source="user")
    assert isinstance(assert_commutes(ctx, aten.mul.Tensor, broadcast(ctx, (B, 4), 0), y), Full)


def test_training_batch_norm_is_refused():
    ctx = context()
    ones = Uniform(torch.ones(4, dtype=torch.float64))
    x = broadcast(ctx, (B, 4), 0)
    result = ctx.apply(aten.batch_norm.default, x, ones, ones, ones, ones, True, 0.1, 1e-5, False)
    assert isinstance(result, Full)
    assert "training-mode" in ctx.sites[""].refusal.reason


def test_assert_commutes_catches_a_wrong_rule(monkeypatch):
    ctx = context()
    rule = RULES[aten.relu.default]
    wrong = Rule(lambda ctx, x: x.with_node(x.node.abs()), rule.always)
    monkeypatch.setitem(RULES, aten.relu.default, wrong)
    with pytest.raises(AssertionError):
        assert_commutes(ctx, aten.relu.default, broadcast(ctx, (B, 4), 0))


def test_sum_of_one_repeated_row_and_gathered_rows():
    """Found by random programs, seed 1001216: the sum lost the axis that only an expanded term repeats."""
    ctx = context()
    row = ctx.apply(aten.expand.default, full(B, 1), [B, 3])
    assert_commutes(ctx, aten.add.Tensor, broadcast(ctx, (B, 1), 0), row)


def test_part_that_is_a_sum_with_a_narrow_term():
    """Found by random programs, seed 2001076: a term of width 1 was contracted with the weight of a wider part."""
    ctx = context()
    narrow = ctx.apply(aten.sub.Tensor, broadcast(ctx, (B, 1), 0), full(B, 3))
    x = ctx.apply(aten.cat.default, [broadcast(ctx, (B, 2), 0), narrow], -1)
    assert_commutes(ctx, aten.linear.default, x, Uniform(torch.randn(4, 5, dtype=torch.float64)))
