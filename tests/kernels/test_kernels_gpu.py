"""Kernels on a CUDA device: the gate over random shapes, and one test for each known way to be wrong."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import MAKERS, Case, Draw, attention_case, din_case, lce_case, linear_case
from numerics import Gate

from ikbo_cli import kernels
from ikbo_cli.kernels.group.op import launch_group
from ikbo_cli.kernels.group.reference import group_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = "cuda"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPES = 334  # a dtype: 1,002 shapes an operator
BF16 = torch.bfloat16


def sizes(seed: int) -> tuple[int, int]:
    """B and U of a random shape; no batch of 0 (tested apart), more users than candidates now and then."""
    draw = torch.Generator().manual_seed(seed)
    users = int(torch.randint(1, 12, (), generator=draw))
    return int(torch.randint(1, 260 if seed % 5 else 8, (), generator=draw)), users


def judge(case: Case, gate: Gate, **extra: str) -> None:
    for got, original, truth in zip(case.run(**extra), case.original(), case.truth(), strict=True):
        gate.add(got, original, truth)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("op", MAKERS)
def test_random_shapes(op: str, dtype: torch.dtype) -> None:
    gate = Gate(dtype)
    for seed in range(SHAPES):
        judge(MAKERS[op](Draw(seed, dtype, CUDA, variants=24), *sizes(seed)), gate, form="triton")
    gate.check()


@pytest.mark.parametrize("op", MAKERS)
def test_aten_form(op: str) -> None:
    gate = Gate(BF16, rounded=True)
    for seed in range(40):
        judge(MAKERS[op](Draw(seed, BF16, CUDA, variants=24), *sizes(seed)), gate, form="aten")
    gate.check()


@pytest.mark.parametrize("batch", [1, 2, 7, 33])
def test_few_tiles_compute_everything(batch: int) -> None:
    gate = Gate(BF16)
    for seed in range(6):
        judge(lce_case(Draw(seed, BF16, CUDA), batch, 2), gate)
        judge(linear_case(Draw(seed, BF16, CUDA), batch * 20, 2), gate)
    gate.check()


@pytest.mark.parametrize("head", [32, 48, 96, 128, 256])
def test_head_sizes(head: int) -> None:
    gate = Gate(BF16)
    for seed in range(3):
        judge(attention_case(Draw(seed, BF16, CUDA), 40, 3, head=head), gate)
    gate.check()


@pytest.mark.parametrize("steps", [1, 3, 63, 64, 65, 128])
def test_query_steps(steps: int) -> None:
    gate = Gate(BF16)
    judge(attention_case(Draw(steps, BF16, CUDA), 30, 3, steps=steps, head=128, keys=300, heads=2), gate)
    gate.check()


def plain_attention(batch: int, users: int, keys: int, steps: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = Draw(seed, BF16, CUDA)
    return {
        "q": draw.normal(batch, steps, 2, 128),
        "k": draw.normal(users, keys, 2, 128),
        "v": draw.normal(users, keys, 2, 128),
        "index": draw.index(batch, users),
    }


@pytest.mark.parametrize("keys", [1, 50, 300, 1000])
def test_nan_of_the_next_user_does_not_spread(keys: int) -> None:
    args = plain_attention(200, 4, keys)
    clean = kernels.broadcast_target_attention(**args)
    for name in ("k", "v"):
        args[name][2] = float("nan")
    dirty = kernels.broadcast_target_attention(**args)
    untouched = args["index"] != 2
    assert torch.equal(clean[untouched], dirty[untouched])
    assert dirty[~untouched].isnan().all()


def test_nan_beside_the_rows_does_not_spread() -> None:
    draw = Draw(0, BF16, CUDA)
    wide_x, wide_w = draw.normal(300, 88), draw.normal(96, 88)
    wide_x[:, 77:], wide_w[:, 77:] = float("nan"), float("nan")
    index, addend = draw.index(300, 5), draw.normal(5, 96, dtype=torch.float32)
    args = {"x_cand": wide_x[:, :77], "w_cand": wide_w[:, :77], "index": index, "addend": addend}
    assert kernels.broadcast_linear(**args, form="triton").isfinite().all()
    e_cand = draw.normal(9, 88, 64)
    e_cand[:, 77:] = float("nan")
    out = kernels.broadcast_lce(e_cand[:, :77], wide_w[:, :77], draw.index(9, 2), form="triton")
    assert out.isfinite().all()


def test_offsets_beyond_32_bits() -> None:
    batch, depth, rows, columns = 9_700, 866, 128, 256  # e_cand holds 2.15e9 elements
    draw = Draw(0, BF16, CUDA)
    e_cand = torch.randn(batch, depth, columns, dtype=BF16, device=CUDA)
    weight, index = draw.normal(rows, depth, scale=depth**-0.5), draw.index(batch, 3)
    addend = draw.normal(3, rows, columns, dtype=torch.float32)
    out = kernels.broadcast_lce(e_cand, weight, index, addend=addend, form="triton")
    for b in (0, batch - 1):
        truth = weight.double() @ e_cand[b].double() + addend[index[b]].double()
        assert (out[b].double() - truth).abs().max() < 0.05


def test_more_candidates_than_a_grid_axis_holds() -> None:
    args = plain_attention(70_000, 40, 64)
    out = kernels.broadcast_target_attention(**args)
    for chosen in (slice(0, 50), slice(69_950, 70_000)):
        part = {**args, "q": args["q"][chosen], "index": args["index"][chosen]}
        truth = Case("broadcast_target_attention", part).truth()[0]
        assert (out[chosen].double() - truth).abs().max() < 0.02


@pytest.mark.parametrize("steps", [1, 8, 64])
def test_a_score_depends_on_its_pair_alone(steps: int) -> None:
    args = plain_attention(300, 5, 900, steps)
    out = kernels.broadcast_target_attention(**args)
    order = torch.randperm(300, device=CUDA)
    shuffled = {**args, "q": args["q"][order], "index": args["index"][order]}
    assert torch.equal(kernels.broadcast_target_attention(**shuffled), out[order])
    few = {**args, "q": args["q"][:7], "index": args["index"][:7]}
    assert torch.equal(kernels.broadcast_target_attention(**few), out[:7])
    more_users = {name: torch.cat([args[name], args[name]]) for name in ("k", "v")}
    assert torch.equal(kernels.broadcast_target_attention(**{**args, **more_users}), out)


@pytest.mark.parametrize("op", MAKERS)
def test_bitwise_repeatable(op: str) -> None:
    case = MAKERS[op](Draw(3, BF16, CUDA), 250, 7)
    first = case.run()
    for _ in range(20):
        for again, once in zip(case.run(), first, strict=True):
            assert torch.equal(again.nan_to_num(7.0), once.nan_to_num(7.0))


@pytest.mark.parametrize("form", ["triton", "aten"])
@pytest.mark.parametrize("op", MAKERS)
def test_index_out_of_range_gives_nan_rows(op: str, form: str) -> None:
    case = MAKERS[op](Draw(11, BF16, CUDA), 60, 5)
    index = case.args["index"]
    good = case.run(form=form)[-1]
    if op in ("broadcast_linear", "broadcast_lce"):
        case.args["addend"] = case.truth()[-1].new_zeros(5, *good.shape[1:]).float()
        good = case.run(form=form)[-1]
    index[3], index[17] = 5, -1
    bad = case.run(form=form)[-1]
    keep = torch.ones(60, dtype=torch.bool, device=CUDA)
    keep[[3, 17]] = False
    assert torch.equal(bad[keep].nan_to_num(7.0), good[keep].nan_to_num(7.0))
    products = slice(None)
    if op == "broadcast_dot_interaction":  # candidate-candidate products and dense columns know no user
        products = slice(0, case.args["x_user"].shape[1] * case.args["x_cand"].shape[1])
    assert bad[~keep].flatten(1)[:, products].isnan().all()


@pytest.mark.parametrize("op", MAKERS)
def test_empty_batch_and_no_users(op: str) -> None:
    case = MAKERS[op](Draw(5, BF16, CUDA), 0, 3)
    assert case.run()[-1].shape[0] == 0
    case = MAKERS[op](Draw(5, BF16, CUDA), 4, 1)
    user_side = {"addend", "x_user", "e_user", "k", "v", "lengths", "mask"}
    args = {n: t[:0] if n in user_side and t is not None else t for n, t in case.args.items()}
    out = Case(op, args).run()[-1]
    if op == "broadcast_dot_interaction":
        out = out[:, : args["x_user"].shape[1] * args["x_cand"].shape[1]]
    if any(args.get(n) is not None for n in user_side):
        assert out.isnan().all()


@pytest.mark.parametrize(
    "batch,users", [(0, 4), (1, 1), (777, 31), (4096, 59), (8192, 8192), (20_000, 300), (150_000, 9)]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_group(batch: int, users: int, dtype: torch.dtype) -> None:
    index = torch.randint(-1, users + 1, (batch,)).to(dtype)
    expected = group_reference(index, users) if users < 1000 else None
    device_index = index.to(CUDA)
    order, offsets = kernels.group_candidates(device_index, users)
    if expected is not None:
        assert torch.equal(order.cpu(), expected[0])
        assert torch.equal(offsets.cpu(), expected[1])
    if 0 < batch <= 131_072:
        for two in (False, True) if batch <= 20_000 else (True,):
            again = launch_group(device_index, users, two_launches=two)
            assert torch.equal(again[0], order)
            assert torch.equal(again[1], offsets)


@pytest.mark.parametrize("op", MAKERS)
def test_captured_in_a_cuda_graph(op: str) -> None:
    case = MAKERS[op](Draw(2, BF16, CUDA), 120, 6)
    expected = [t.clone() for t in case.run()]  # also compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.run()
    for tensor in captured:
        tensor.fill_(float("nan"))
    graph.replay()
    for got, want in zip(captured, expected, strict=True):
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    case.args["index"].copy_(case.args["index"].flip(0))  # a replay must regroup
    graph.replay()
    for got, want in zip(captured, case.run(), strict=True):
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("op", MAKERS)
def test_compiled_with_dynamic_sizes(op: str) -> None:
    torch._dynamo.reset()
    function = getattr(kernels, op)
    compiled = torch.compile(lambda args: function(**args), dynamic=True, fullgraph=True)
    for batch, users in ((40, 6), (77, 9)):
        case = MAKERS[op](Draw(9, BF16, CUDA), batch, users)
        got = compiled(case.args)
        for one, want in zip(got if isinstance(got, tuple) else (got,), case.run(), strict=True):
            torch.testing.assert_close(one, want, atol=0.06, rtol=0.06, equal_nan=True)


@pytest.mark.parametrize("op", ["broadcast_linear", "broadcast_target_attention", "broadcast_din_unit"])
def test_aot_inductor_package(op: str, tmp_path) -> None:
    class Model(torch.nn.Module):
        def forward(self, tensors):
            return getattr(kernels, op)(**tensors, **constants)

    case = {"broadcast_linear": linear_case, "broadcast_target_attention": attention_case}.get(op, din_case)(
        Draw(4, BF16, CUDA), 40, 6
    )
    tensors = {k: v for k, v in case.args.items() if isinstance(v, torch.Tensor)}
    constants = {k: v for k, v in case.args.items() if k not in tensors}
    batch, users = torch.export.Dim("batch"), torch.export.Dim("users")
    dims = {40: batch, 6: users}
    shapes = {
        k: {0: dims[v.shape[0]]} if v.shape[0] in dims and not k.startswith("w") else None for k, v in tensors.items()
    }
    program = torch.export.export(Model(), (tensors,), dynamic_shapes={"tensors": shapes})
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    loaded = torch._inductor.aoti_load_package(path)
    for got, want in zip(torch.utils._pytree.tree_leaves(loaded(tensors)), case.run(), strict=True):
        torch.testing.assert_close(got, want, atol=0.06, rtol=0.06, equal_nan=True)


@pytest.mark.parametrize("op", MAKERS)
def test_opcheck(op: str) -> None:
    case = MAKERS[op](Draw(6, torch.float32, CUDA), 20, 4)
    arguments = list(case.args.values())
    if op == "broadcast_target_attention":
        order, offsets = kernels.group_candidates(case.args["index"], 4)
        arguments[4:4] = [order, offsets]
    torch.library.opcheck(getattr(torch.ops.ikbo, op).default, (*arguments, "triton"))


@pytest.mark.parametrize("op", MAKERS)
def test_gradients(op: str) -> None:
    case = MAKERS[op](Draw(8, torch.float32, CUDA), 50, 4)
    leaves = {k: v for k, v in case.args.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    leaves = {k: v.nan_to_num(0.0).requires_grad_() for k, v in leaves.items() if k != "mask"}
    doubles = {k: v.detach().double().requires_grad_() for k, v in leaves.items()}
    out = Case(op, {**case.args, **leaves}).run(form="triton")
    truth = Case(op, {**case.args, **doubles}).truth()
    seeds = [torch.randn_like(t) for t in out]
    got = torch.autograd.grad(out, list(leaves.values()), seeds, allow_unused=True)
    again = torch.autograd.grad(
        Case(op, {**case.args, **leaves}).run(form="triton"), list(leaves.values()), seeds, allow_unused=True
    )
    want = torch.autograd.grad(truth, list(doubles.values()), [t.double() for t in seeds], allow_unused=True)
    for name, one, repeat, exact in zip(leaves, got, again, want, strict=True):
        if exact is None:
            continue
        torch.testing.assert_close(one.double(), exact, atol=2e-3, rtol=2e-3, msg=name)
        assert torch.equal(one, repeat), name  # sums over candidates run in a fixed order
