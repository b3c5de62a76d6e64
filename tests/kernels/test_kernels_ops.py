"""Operators on the CPU: numerics, errors, gradients, export, compilation."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from kernel_cases import MAKERS, Case, Draw
from numerics import Gate

from ikbo_cli import kernels
from ikbo_cli.errors import ShapeError
from ikbo_cli.kernels.group.reference import group_reference

SIZES = [(5, 3), (60, 4), (1, 1), (6, 9), (0, 2), (33, 1), (12, 12)]
IDS = [f"B{b}-U{u}" for b, u in SIZES]
LAUNCH_OPERATORS = {"broadcast_target_attention", "broadcast_lce"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("op", MAKERS)
def test_against_float64(op: str, dtype: torch.dtype) -> None:
    gate = Gate(dtype)
    for seed in range(35):
        case = MAKERS[op](Draw(seed, dtype), *SIZES[seed % len(SIZES)])
        for got, original, truth in zip(case.run(), case.original(), case.truth(), strict=True):
            gate.add(got, original, truth)
    gate.check()


@pytest.mark.parametrize(("batch", "users"), SIZES, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_group(batch: int, users: int, dtype: torch.dtype) -> None:
    index = torch.randint(0, users, (batch,), generator=torch.Generator().manual_seed(0)).to(dtype)
    order, offsets = kernels.group_candidates(index, users)
    expected = group_reference(index, users)
    assert torch.equal(order, expected[0])
    assert torch.equal(offsets, expected[1])
    assert order.dtype == offsets.dtype == torch.int32


def test_one_user_has_almost_all_candidates() -> None:
    draw = Draw(0, torch.float32)
    case = MAKERS["broadcast_target_attention"](draw, 200, 20)
    index = torch.zeros(200, dtype=torch.int64)
    index[:20] = torch.arange(20)
    skewed = replace(case, args={**case.args, "index": index[torch.randperm(200)]})
    torch.testing.assert_close(skewed.run()[0].double(), skewed.truth()[0], atol=1e-5, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("position", [-1, 4])
@pytest.mark.parametrize("op", MAKERS)
def test_index_out_of_range_raises(op: str, position: int) -> None:
    case = MAKERS[op](Draw(1, torch.float32), 10, 4)
    if op in ("broadcast_linear", "broadcast_lce"):
        out = case.truth()[0]
        case.args["addend"] = torch.zeros(4, *out.shape[1:])
    case.args["index"][3] = position
    with pytest.raises(IndexError):
        case.run()


WRONG = {
    "broadcast_gather_add": ("addend", lambda t: t[..., :-1], "x_cand"),
    "broadcast_linear": ("w_cand", lambda t: t[:, :-1], "x_cand"),
    "broadcast_lce": ("w_cand", lambda t: t[:, :-1], "e_cand"),
    "broadcast_target_attention": ("k", lambda t: t[..., :-1], "q"),
    "broadcast_din_unit": ("k", lambda t: t[..., :-1], "q"),
    "broadcast_dot_interaction": ("x_user", lambda t: t[..., :-1], "x_cand"),
}


@pytest.mark.parametrize("op", WRONG)
def test_shape_error_names_both_shapes(op: str) -> None:
    case = MAKERS[op](Draw(2, torch.float32), 10, 4)
    name, spoil, other = WRONG[op]
    case.args[name] = spoil(case.args[name])
    with pytest.raises(ShapeError) as error:
        case.run()
    for tensor in (case.args[name], case.args[other]):
        assert str(list(tensor.shape)) in str(error.value)
    assert op in str(error.value)


@pytest.mark.parametrize("op", MAKERS)
def test_wrong_dtype_and_index(op: str) -> None:
    case = MAKERS[op](Draw(2, torch.float32), 10, 4)
    name = WRONG[op][0]
    with pytest.raises(ShapeError, match=name):
        replace(case, args={**case.args, name: case.args[name].int()}).run()
    with pytest.raises(ShapeError, match="index"):
        replace(case, args={**case.args, "index": case.args["index"].float()}).run()
    with pytest.raises(ShapeError, match="index"):
        replace(case, args={**case.args, "index": case.args["index"][:-1]}).run()


def test_unknown_names_are_shape_errors() -> None:
    case = MAKERS["broadcast_linear"](Draw(2, torch.float32), 10, 4)
    with pytest.raises(ShapeError, match="softplus"):
        replace(case, args={**case.args, "act": "softplus"}).run()
    with pytest.raises(ShapeError, match="block_q"):
        case.run(form="triton:block_q=3")


@pytest.mark.parametrize("op", MAKERS)
def test_gradcheck(op: str) -> None:
    for seed in (0, 1, 3):
        args = dict(MAKERS[op](Draw(seed, torch.float64), 6, 3).args)
        for name in {"addend", "params1", "params2"} & args.keys():
            args[name] = None if args[name] is None else args[name].double()
        if args.get("act") in ("relu", "prelu"):
            args["act"] = "tanh"  # a kink spoils finite differences
        if "nan_if_empty" in args:
            args["nan_if_empty"] = False
        floats = [k for k, v in args.items() if isinstance(v, torch.Tensor) and v.is_floating_point()]
        names = [k for k in floats if k != "mask"]
        leaves = [args[k].nan_to_num(0.0).clone().requires_grad_() for k in names]

        def function(*tensors: torch.Tensor, args=args, names=names):
            return Case(op, {**args, **dict(zip(names, tensors, strict=True))}).run()

        assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("op", MAKERS)
def test_opcheck(op: str) -> None:
    case = MAKERS[op](Draw(6, torch.float32), 20, 4)
    arguments = list(case.args.values())
    if op == "broadcast_target_attention":
        arguments[4:4] = kernels.group_candidates(case.args["index"], 4)
    torch.library.opcheck(getattr(torch.ops.ikbo, op).default, (*arguments, "auto"))


def exported(op: str, case: Case) -> tuple[torch.export.ExportedProgram, dict[str, torch.Tensor]]:
    tensors = {k: v for k, v in case.args.items() if isinstance(v, torch.Tensor)}
    constants = {k: v for k, v in case.args.items() if k not in tensors}

    class Model(torch.nn.Module):
        def forward(self, tensors):
            return getattr(kernels, op)(**tensors, **constants)

    dims = {20: torch.export.Dim("batch"), 4: torch.export.Dim("users")}
    weights = ("w", "b", "params")
    shapes = {
        k: {0: dims[v.shape[0]]} if v.shape[0] in dims and not k.startswith(weights) else None
        for k, v in tensors.items()
    }
    return torch.export.export(Model(), (tensors,), dynamic_shapes={"tensors": shapes}), tensors


@pytest.mark.parametrize("op", MAKERS)
def test_export_save_and_reload(op: str, tmp_path) -> None:
    program, _ = exported(op, MAKERS[op](Draw(6, torch.float32), 20, 4))
    assert any(f"ikbo.{op}" in str(node.target) for node in program.graph.nodes)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for batch, users in ((20, 4), (7, 1), (3, 6), (1, 1)):
        other = MAKERS[op](Draw(6, torch.float32), batch, users)
        tensors = {k: v for k, v in other.args.items() if isinstance(v, torch.Tensor)}
        result = loaded(tensors)
        for got, want in zip(result if isinstance(result, tuple) else (result,), other.run(), strict=True):
            torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("op", MAKERS)
def test_compiled_with_dynamic_sizes(op: str) -> None:
    torch._dynamo.reset()
    function = getattr(kernels, op)
    compiled = torch.compile(lambda args: function(**args), dynamic=True, fullgraph=True)
    for batch, users in ((20, 4), (33, 7)):
        case = MAKERS[op](Draw(9, torch.float32), batch, users)
        result = compiled(case.args)
        for got, want in zip(result if isinstance(result, tuple) else (result,), case.run(), strict=True):
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4, equal_nan=True)


def test_importing_and_calling_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import torch, ikbo_cli.ops; from ikbo_cli import kernels;"
        "x = torch.randn(4, 3); kernels.broadcast_linear(x, x, torch.tensor([0, 1, 0, 1]))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_public_function_is_named_like_a_folder() -> None:
    folders = {"group", "lce", "linear", "target_attention", "din_unit", "dot_interaction", "gather_add"}
    assert not folders & set(kernels.__all__)
    assert all(callable(getattr(kernels, name)) for name in kernels.__all__)
