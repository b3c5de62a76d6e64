"""Random cases of every operator: arguments, the float64 truth, and the program as a model would write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ikbo_cli import kernels
from ikbo_cli.kernels.din_unit.configs import DinConfig
from ikbo_cli.kernels.din_unit.op import DIN_ACTIVATIONS, launch_din_unit
from ikbo_cli.kernels.din_unit.reference import din_unit_reference
from ikbo_cli.kernels.dot_interaction.configs import DotConfig
from ikbo_cli.kernels.dot_interaction.op import launch_dot_interaction
from ikbo_cli.kernels.dot_interaction.reference import dot_interaction_reference
from ikbo_cli.kernels.gather_add.op import launch_gather_add
from ikbo_cli.kernels.gather_add.reference import gather_add_reference
from ikbo_cli.kernels.lce.configs import LceConfig
from ikbo_cli.kernels.lce.op import launch_lce
from ikbo_cli.kernels.lce.reference import lce_reference
from ikbo_cli.kernels.linear.configs import LinearConfig
from ikbo_cli.kernels.linear.op import launch_linear, user_part
from ikbo_cli.kernels.linear.reference import linear_reference
from ikbo_cli.kernels.shared.activation import ACTIVATIONS
from ikbo_cli.kernels.target_attention.configs import AttentionConfig
from ikbo_cli.kernels.target_attention.op import launch_target_attention
from ikbo_cli.kernels.target_attention.reference import target_attention_reference


class Draw:
    """Random tensors of one dtype on one device, from a seed.

    `variants` bounds how many different structures (shapes that a kernel is compiled for, flags, strides) the
    seeds draw from: on a device every structure costs a compilation, values and run-time sizes cost nothing.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: str = "cpu", variants: int | None = None) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.structure = torch.Generator().manual_seed(1000 + (seed if variants is None else seed % variants))
        self.dtype = dtype
        self.device = device

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(*shape, generator=self.generator) * scale
        return values.to(self.device, dtype or self.dtype)

    def number(self, low: int, high: int) -> int:
        """An integer in `[low, high]` that belongs to the structure."""
        return int(torch.randint(low, high + 1, (), generator=self.structure))

    def size(self, low: int, high: int) -> int:
        """A run-time size in `[low, high]`."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def choice(self, options: Any) -> Any:
        return options[self.number(0, len(options) - 1)]

    def index(self, batch: int, users: int) -> Tensor:
        """Unsorted, uneven, int32 or int64; some users may have no candidate."""
        values = torch.randint(0, users, (batch,), generator=self.generator)
        return values.to(self.device, self.choice((torch.int32, torch.int64)))

    def lengths(self, users: int, keys: int) -> Tensor:
        return torch.randint(0, keys + 1, (users,), generator=self.generator).to(self.device, torch.int32)

    def bools(self, *shape: int) -> Tensor:
        return (torch.rand(*shape, generator=self.generator) < 0.7).to(self.device)

    def strided(self, tensor: Tensor) -> Tensor:
        """The tensor itself, or the same values in a column slice of a wider one (NaN beside them)."""
        if self.number(0, 2):
            return tensor
        wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 8), float("nan"))
        wide[..., : tensor.shape[-1]] = tensor
        return wide[..., : tensor.shape[-1]]

    def maybe(self, tensor: Tensor) -> Tensor | None:
        return tensor if self.number(0, 1) else None


def lifted(value: Any) -> Any:
    """Floating tensors as float64; everything else as it is."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def nan_filled(tensors: Any) -> Any:
    """Copies of outputs, full of NaN."""
    if isinstance(tensors, tuple):
        return tuple(nan_filled(t) for t in tensors)
    return torch.full_like(tensors, float("nan"))


@dataclass(frozen=True)
class Case:
    """Arguments of one operator by name; outputs are always tuples of tensors."""

    op: str
    args: dict[str, Any]

    def run(self, **extra: Any) -> tuple[Tensor, ...]:
        """The public operator."""
        result = getattr(kernels, self.op)(**self.args, **extra)
        return result if isinstance(result, tuple) else (result,)

    def truth(self) -> tuple[Tensor, ...]:
        """The reference on float64 copies."""
        result = REFERENCES[self.op](**{k: lifted(v) for k, v in self.args.items()})
        return result if isinstance(result, tuple) else (result,)

    def original(self) -> tuple[Tensor, ...]:
        """The same maths in the case's own dtype, user rows written out, as models do."""
        result = ORIGINALS[self.op](**self.args)
        return result if isinstance(result, tuple) else (result,)

    def launch(self) -> tuple[Tensor, ...]:
        """The Triton kernel itself with a small tile, outputs filled with NaN first (interpreter)."""
        out = nan_filled(tuple(t.to(self.dtype()) for t in self.truth()))
        return LAUNCHES[self.op](self.args, out)

    def dtype(self) -> torch.dtype:
        return next(v.dtype for v in self.args.values() if isinstance(v, Tensor) and v.is_floating_point())


def gather_add_case(draw: Draw, batch: int, users: int) -> Case:
    middle = draw.choice(((), (3,), (2, 2)))
    columns = draw.number(1, 80)
    return Case(
        "broadcast_gather_add",
        {
            "x_cand": draw.strided(draw.normal(batch, *middle, columns)),
            "addend": draw.normal(users, *middle, columns, dtype=torch.float32),
            "index": draw.index(batch, users),
            "bias": draw.maybe(draw.normal(columns)),
            "act": draw.choice(ACTIVATIONS),
        },
    )


def linear_case(draw: Draw, batch: int, users: int, depth: int = 0, columns: int = 0) -> Case:
    middle = draw.choice(((), (), (3,)))
    depth, user_depth = depth or draw.number(1, 150), draw.number(1, 90)
    columns = columns or draw.number(1, 150)
    weight = draw.strided(draw.normal(columns, depth, scale=depth**-0.5))
    if draw.number(0, 3) == 0:
        weight = draw.normal(depth, columns, scale=depth**-0.5).T
    with_user = draw.number(0, 3) > 0
    return Case(
        "broadcast_linear",
        {
            "x_cand": draw.strided(draw.normal(batch, *middle, depth)),
            "w_cand": weight,
            "index": draw.index(batch, users),
            "x_user": draw.normal(users, *middle, user_depth) if with_user else None,
            "w_user": draw.normal(columns, user_depth, scale=user_depth**-0.5) if with_user else None,
            "addend": draw.maybe(draw.normal(users, *middle, columns, dtype=torch.float32)),
            "bias": draw.maybe(draw.normal(columns)),
            "act": draw.choice(ACTIVATIONS),
        },
    )


def lce_case(draw: Draw, batch: int, users: int, depth: int = 0) -> Case:
    depth, user_depth = depth or draw.number(1, 150), draw.number(1, 90)
    rows, columns = draw.number(1, 200), draw.choice((8, 17, 64, 72, 128))
    return Case(
        "broadcast_lce",
        {
            "e_cand": draw.strided(draw.normal(batch, depth, columns)),
            "w_cand": draw.strided(draw.normal(rows, depth, scale=depth**-0.5)),
            "index": draw.index(batch, users),
            "e_user": draw.normal(users, user_depth, columns),
            "w_user": draw.normal(rows, user_depth, scale=user_depth**-0.5),
            "addend": draw.maybe(draw.normal(users, rows, columns, dtype=torch.float32)),
            "bias": draw.maybe(draw.normal(rows)),
            "act": draw.choice(ACTIVATIONS),
        },
    )


def attention_case(
    draw: Draw, batch: int, users: int, steps: int = 0, head: int = 0, keys: int = 0, heads: int = 0
) -> Case:
    steps, keys, heads = (
        steps or draw.choice((1, 1, 2, 5, 8)),
        keys or draw.size(1, 70),
        heads or draw.number(1, 3),
    )
    head = head or draw.choice((16, 24, 48, 64))
    k = draw.strided(draw.normal(users, keys, heads, head))
    v = draw.strided(draw.normal(users, keys, heads, head))
    lengths = draw.maybe(draw.lengths(users, keys))
    if lengths is not None:  # what lies beyond a history must never be read
        beyond = (torch.arange(keys, device=k.device) >= lengths[:, None])[:, :, None, None]
        k, v = k.masked_fill(beyond, float("nan")), v.masked_fill(beyond, float("nan"))
    additive = draw.normal(users, keys).masked_fill(~draw.bools(users, keys), float("-inf"))
    return Case(
        "broadcast_target_attention",
        {
            "q": draw.strided(draw.normal(batch, steps, heads, head)),
            "k": k,
            "v": v,
            "index": draw.index(batch, users),
            "lengths": lengths,
            "mask": draw.choice((None, draw.bools(users, keys), additive)),
            "scale": draw.choice((None, 0.2)),
            "nan_if_empty": bool(draw.number(0, 1)),
        },
    )


def din_case(draw: Draw, batch: int, users: int, depth: int = 0, keys: int = 0) -> Case:
    depth, keys = depth or draw.choice((8, 20, 64)), keys or draw.size(1, 50)
    units = draw.choice((8, 36, 80))
    tail = draw.choice((None, 8, 40))
    act = draw.choice(DIN_ACTIVATIONS)
    softmax = bool(draw.number(0, 1))
    k = draw.strided(draw.normal(users, keys, depth))
    lengths = draw.maybe(draw.lengths(users, keys))
    if lengths is not None:
        beyond = (torch.arange(keys, device=k.device) >= lengths[:, None])[:, :, None]
        k = k.masked_fill(beyond, float("nan"))
    additive = draw.normal(users, keys).masked_fill(~draw.bools(users, keys), float("-inf"))
    with_params = act in ("prelu", "dice")
    last = tail or units
    return Case(
        "broadcast_din_unit",
        {
            "q": draw.strided(draw.normal(batch, depth)),
            "k": k,
            "index": draw.index(batch, users),
            "w1": draw.normal(units, 4 * depth, scale=0.5 * depth**-0.5),
            "b1": draw.maybe(draw.normal(units)),
            "w_out": draw.normal(1, last, scale=last**-0.5),
            "b_out": draw.maybe(draw.normal(1)),
            "w2": draw.normal(tail, units, scale=units**-0.5) if tail else None,
            "b2": draw.normal(tail) if tail else None,
            "act": act,
            "params1": draw.normal(3, units, dtype=torch.float32) if with_params else None,
            "params2": draw.normal(3, tail, dtype=torch.float32) if with_params and tail else None,
            "lengths": lengths,
            "mask": draw.choice((None, draw.bools(users, keys), additive if softmax else None)),
            "softmax": softmax,
            "scale": 0.7,
            "nan_if_empty": bool(draw.number(0, 1)),
        },
    )


def dot_case(draw: Draw, batch: int, users: int) -> Case:
    user_fields, cand_fields, depth = draw.number(1, 20), draw.number(1, 12), draw.choice((8, 16, 33))
    return Case(
        "broadcast_dot_interaction",
        {
            "x_user": draw.strided(draw.normal(users, user_fields, depth)),
            "x_cand": draw.strided(draw.normal(batch, cand_fields, depth)),
            "index": draw.index(batch, users),
            "dense": draw.maybe(draw.normal(batch, draw.number(1, 30))),
        },
    )


MAKERS = {
    "broadcast_gather_add": gather_add_case,
    "broadcast_linear": linear_case,
    "broadcast_lce": lce_case,
    "broadcast_target_attention": attention_case,
    "broadcast_din_unit": din_case,
    "broadcast_dot_interaction": dot_case,
}

REFERENCES: dict[str, Any] = {
    "broadcast_gather_add": gather_add_reference,
    "broadcast_linear": linear_reference,
    "broadcast_lce": lce_reference,
    "broadcast_target_attention": target_attention_reference,
    "broadcast_din_unit": din_unit_reference,
    "broadcast_dot_interaction": dot_interaction_reference,
}


def _original_gather_add(x_cand: Tensor, addend: Tensor, index: Tensor, bias: Any, act: str) -> Tensor:
    return gather_add_reference(x_cand, addend.to(x_cand.dtype), index, bias, act)


def _original_linear(
    x_cand: Tensor, w_cand: Tensor, index: Tensor, x_user: Any, w_user: Any, addend: Any, bias: Any, act: str
) -> Tensor:
    addend = None if addend is None else addend.to(x_cand.dtype)
    if x_user is not None:
        x_cand, w_cand = torch.cat([x_user[index], x_cand], -1), torch.cat([w_user, w_cand], -1)
    return linear_reference(x_cand, w_cand, index, None, None, addend, bias, act)


def _original_lce(
    e_cand: Tensor, w_cand: Tensor, index: Tensor, e_user: Any, w_user: Any, addend: Any, bias: Any, act: str
) -> Tensor:
    addend = None if addend is None else addend.to(e_cand.dtype)
    stacked, weight = torch.cat([e_user[index], e_cand], 1), torch.cat([w_user, w_cand], 1)
    return lce_reference(stacked, weight, index, None, None, addend, bias, act)


def _original_attention(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, lengths: Any, mask: Any, scale: Any, nan_if_empty: bool
) -> Tensor:
    kept = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
    if lengths is not None:
        kept &= torch.arange(k.shape[1], device=k.device) < lengths[:, None]
        k, v = (t.masked_fill(~kept[:, :, None, None], 0.0) for t in (k, v))
    bias = torch.zeros(k.shape[:2], dtype=q.dtype, device=k.device)
    if mask is not None:
        bias = bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else mask.to(q.dtype)
    bias = bias.masked_fill(~kept, float("-inf"))
    empty = (bias == float("-inf")).all(1)[index][:, None, None, None]
    q, k, v = q.transpose(1, 2), k[index].transpose(1, 2), v[index].transpose(1, 2)
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[index][:, None, None, :], scale=scale)
    return out.transpose(1, 2).masked_fill(empty, float("nan") if nan_if_empty else 0.0)


ORIGINALS: dict[str, Any] = {
    "broadcast_gather_add": _original_gather_add,
    "broadcast_linear": _original_linear,
    "broadcast_lce": _original_lce,
    "broadcast_target_attention": _original_attention,
    "broadcast_din_unit": din_unit_reference,
    "broadcast_dot_interaction": dot_interaction_reference,
}


def _launch_gather_add(a: dict[str, Any], out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (launch_gather_add(*a.values(), out=out[0]),)


def _launch_linear(a: dict[str, Any], out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    user = user_part(a["x_user"], a["w_user"], a["addend"])
    config = LinearConfig(32, 32, 16, 4, 2, halves=a["x_cand"].shape[0] % 2)
    return (launch_linear(a["x_cand"], a["w_cand"], a["index"], user, a["bias"], a["act"], config=config, out=out[0]),)


def _launch_lce(a: dict[str, Any], out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    config = LceConfig(128, 32, 16, 4, 2, halves=a["e_cand"].shape[0] % 2)
    user = launch_lce(a["e_user"], a["w_user"], None, None, None, "none", wide=True, config=config)
    user = user if a["addend"] is None else user + a["addend"]
    return (launch_lce(a["e_cand"], a["w_cand"], a["index"], user, a["bias"], a["act"], config=config, out=out[0]),)


def _launch_attention(a: dict[str, Any], out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    order, offsets = kernels.group_candidates(a["index"], a["k"].shape[0])
    scale = a["q"].shape[-1] ** -0.5 if a["scale"] is None else a["scale"]
    config = AttentionConfig(16, 16, 4, 2, span=16 if a["q"].shape[1] == 1 else 0)
    result = launch_target_attention(
        a["q"], a["k"], a["v"], order, offsets, a["lengths"], a["mask"], scale, a["nan_if_empty"],
        config=config, out=out[0],
    )  # fmt: skip
    return (result,)


def _launch_din(a: dict[str, Any], out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (launch_din_unit(*a.values(), config=DinConfig(16, 4, 2), out=out[0]),)


def _launch_dot(a: dict[str, Any], out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return launch_dot_interaction(*a.values(), config=DotConfig(16, 4), out=(out[0], out[1]))


LAUNCHES: dict[str, Any] = {
    "broadcast_gather_add": _launch_gather_add,
    "broadcast_linear": _launch_linear,
    "broadcast_lce": _launch_lce,
    "broadcast_target_attention": _launch_attention,
    "broadcast_din_unit": _launch_din,
    "broadcast_dot_interaction": _launch_dot,
}
