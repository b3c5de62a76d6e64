"""Random programs over user, candidate and mixed tensors, walked, emitted and compared in memory.

    python tests/broadcast/random_programs.py --seed 0 --count 50000

Each program is built as a graph with symbolic input sizes, rewritten, and interpreted in float64 for several maps and
batch sizes. A failure prints the seed, which alone reproduces it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ikbo_cli.broadcast import Declared, walk

aten = torch.ops.aten
BATCH, USERS = 7, 3
WIDTHS = (1, 2, 3, 4, 6)


class Builder:
    """Grows one graph; `pool` holds (node, example) of every tensor so far, all with rows on axis 0."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        # Few widths a program, so that shapes meet often.
        self.widths = self.rng.sample(WIDTHS, 2)
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self.pool: list[tuple[fx.Node, torch.Tensor]] = []
        self.user_inputs: list[str] = []
        self.shapes: dict[str, tuple[tuple[int, ...], bool]] = {}
        self.size: fx.Node | None = None

    def tensor(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def weight(self, *shape: int) -> fx.Node:
        name = f"w{len(list(self.root.buffers()))}"
        value = self.tensor(*shape)
        self.root.register_buffer(name, value)
        node = self.graph.get_attr(name)
        node.meta["val"] = value
        return node

    def add_input(self, name: str, *, user: bool) -> None:
        shape = (BATCH, self.rng.choice(self.widths)) + (
            (self.rng.choice(self.widths),) if self.rng.random() < 0.5 else ()
        )
        example = self.tensor(*shape)
        node = self.graph.placeholder(name)
        dims = [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (len(shape) - 1)
        # Every input shares the symbol of the batch, as an exported program does.
        node.meta["val"] = self.mode.from_tensor(example, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims))
        if self.pool:
            first = self.pool[0][0].meta["val"]
            with self.mode:
                node.meta["val"] = torch.empty(first.shape[0], *shape[1:], dtype=torch.float64)
        self.pool.append((node, example))
        self.shapes[name] = (shape[1:], user)
        if user:
            self.user_inputs.append(name)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> None:
        """Emit an op if it runs on the examples and keeps the rows first."""
        examples = dict((id(node), value) for node, value in self.pool)

        def example(node: fx.Node) -> Any:
            if node.op == "get_attr":
                return getattr(self.root, str(node.target))
            return BATCH if node is self.size else examples[id(node)]

        result = op(*fx.map_arg(list(args), example), **kwargs)
        if isinstance(result, (list, tuple)) or result.dim() < 1 or result.shape[0] != BATCH or result.numel() > 20_000:
            return
        if result.dim() > 4 or not result.dtype.is_floating_point:
            return
        if BATCH in result.shape[1:]:  # another axis of B rows: parameters could not fit every batch size
            return
        node = self.graph.call_function(op, args, kwargs)
        node.meta["val"] = result
        self.pool.append((node, result))

    def pick(self, test: Callable[[torch.Tensor], bool] = lambda t: True) -> tuple[fx.Node, torch.Tensor]:
        found = [item for item in self.pool[-12:] + self.pool[:4] if test(item[1])]
        if not found:
            raise LookupError
        return self.rng.choice(found)

    def step(self) -> None:
        rng = self.rng
        kind = rng.choice(STEPS)
        x, t = self.pick()
        n = t.dim()
        axis = rng.randrange(1, n) if n > 1 else 0
        match kind:
            case "unary":
                op = rng.choice(
                    [aten.relu.default, aten.tanh.default, aten.sigmoid.default, aten.neg.default, aten.abs.default]
                )
                self.call(op, x)
            case "scalar":
                self.call(
                    rng.choice([aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor]), x, rng.choice([0.5, 2, -1.5])
                )
            case "binary":
                y, _ = self.pick(lambda o: _broadcasts(o, t))
                self.call(rng.choice([aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.maximum.default]), x, y)
            case "linear" if n > 1:
                out = rng.choice(self.widths)
                bias = self.weight(out) if rng.random() < 0.5 else None
                self.call(aten.linear.default, x, self.weight(out, t.shape[-1]), bias)
            case "cat" if n > 1:
                others = [self.pick(lambda o: _cats(o, t, axis))[0] for _ in range(rng.randrange(1, 4))]
                items = [x, *others]
                rng.shuffle(items)
                self.call(rng.choice([aten.cat.default, aten.concat.default]), items, rng.choice([axis, axis - n]))
            case "stack" if n < 4:
                items = [x] + [self.pick(lambda o: o.shape == t.shape)[0] for _ in range(rng.randrange(1, 3))]
                self.call(aten.stack.default, items, rng.randrange(1, n + 1))
            case "view" if n > 2:
                assert self.size is not None
                at = rng.randrange(1, n - 1)
                shape = [*t.shape[1:at], t.shape[at] * t.shape[at + 1], *t.shape[at + 2 :]]
                first = rng.choice([-1, self.size])
                self.call(
                    rng.choice([aten.view.default, aten.reshape.default])
                    if t.is_contiguous()
                    else aten.reshape.default,
                    x,
                    [first, *shape],
                )
            case "flatten" if n > 2:
                self.call(aten.flatten.using_ints, x, 1, rng.choice([-1, 2]))
            case "unflatten" if n > 1 and n < 4 and t.shape[axis] % 2 == 0:
                self.call(aten.unflatten.int, x, axis, [2, t.shape[axis] // 2])
            case "merge rows" if n == 3:
                self._round_trip(x, t)
            case "permute" if n > 2:
                order = list(range(1, n))
                rng.shuffle(order)
                self.call(aten.permute.default, x, [0, *order])
            case "transpose" if n > 2:
                self.call(aten.transpose.int, x, 1, rng.choice([2, -1]))
            case "unsqueeze" if n < 4:
                self.call(aten.unsqueeze.default, x, rng.randrange(1, n + 1))
            case "squeeze" if n > 1:
                self.call(aten.squeeze.dim, x, axis)
            case "slice" if n > 1 and t.shape[axis] > 1:
                start = rng.randrange(0, t.shape[axis] - 1)
                self.call(aten.slice.Tensor, x, axis, start, rng.randrange(start + 1, t.shape[axis] + 1))
            case "select" if n > 2:
                self.call(aten.select.int, x, axis, rng.randrange(t.shape[axis]))
            case "reduce" if n > 1:
                op = rng.choice([aten.sum.dim_IntList, aten.mean.dim, aten.amax.default])
                self.call(op, x, [axis], rng.random() < 0.5)
            case "softmax" if n > 1:
                self.call(rng.choice([aten.softmax.int, aten.cumsum.default]), x, axis)
            case "norm" if n > 1:
                self.call(aten.layer_norm.default, x, [t.shape[-1]])
            case "rows" if n > 1:
                # Rows influence each other here: the walk must materialize.
                self.call(rng.choice([aten.cumsum.default, aten.softmax.int]), x, 0)
            case "bmm" if n == 3:
                y, _ = self.pick(lambda o: o.dim() == 3 and o.shape[1] == t.shape[2])
                self.call(rng.choice([aten.bmm.default, aten.matmul.default]), x, y)
            case "gram" if n == 3:
                flipped = self.pool[-1]
                self.call(aten.transpose.int, x, 1, 2)
                if self.pool[-1] is not flipped:
                    self.call(aten.bmm.default, x, self.pool[-1][0])
            case "lce" if n == 3:
                self.call(aten.matmul.default, self.weight(rng.choice(self.widths), t.shape[1]), x)
            case "expand" if n > 1 and 1 in t.shape[1:]:
                self.call(aten.expand.default, x, [-1] + [3 if s == 1 else -1 for s in t.shape[1:]])
            case "pick fields" if n > 1:
                index = torch.randint(0, t.shape[axis], (3,), generator=self.generator)
                name = f"i{len(list(self.root.buffers()))}"
                self.root.register_buffer(name, index)
                node = self.graph.get_attr(name)
                node.meta["val"] = index
                self.call(aten.index_select.default, x, axis, node)
            case "attention" if n == 3:
                y, _ = self.pick(lambda o: o.dim() == 3 and o.shape[2] == t.shape[2])
                self.call(aten.scaled_dot_product_attention.default, x, y, y)
            case "einsum" if n == 3:
                y, _ = self.pick(lambda o: o.dim() == 3 and o.shape[2] == t.shape[2])
                self.call(aten.einsum.default, rng.choice(["bij,bkj->bik", "bij,bkj->bki"]), [x, y])
            case _:
                raise LookupError

    def _round_trip(self, x: fx.Node, t: torch.Tensor) -> None:
        """Rows and another axis merged, a linear, and split again."""
        count = len(self.pool)
        flat = t.reshape(-1, t.shape[2])
        node = self.graph.call_function(aten.reshape.default, (x, [-1, t.shape[2]]))
        node.meta["val"] = flat
        weight = self.weight(2, t.shape[2])
        product = self.graph.call_function(aten.linear.default, (node, weight))
        product.meta["val"] = torch.nn.functional.linear(flat, getattr(self.root, str(weight.target)))
        back = self.graph.call_function(aten.view.default, (product, [-1, t.shape[1], 2]))
        back.meta["val"] = product.meta["val"].view(-1, t.shape[1], 2)
        self.pool.append((back, back.meta["val"]))
        assert len(self.pool) == count + 1


STEPS = (
    "unary", "scalar", "binary", "binary", "linear", "linear", "cat", "cat", "cat", "stack", "view", "flatten",
    "unflatten", "merge rows", "permute", "transpose", "unsqueeze", "squeeze", "slice", "select", "reduce", "softmax",
    "norm", "rows", "bmm", "gram", "lce", "expand", "pick fields", "attention", "einsum",
)  # fmt: skip


def _broadcasts(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dim() != b.dim():
        return False
    return all(x == y or 1 in (x, y) for x, y in zip(a.shape, b.shape, strict=True))


def _cats(a: torch.Tensor, b: torch.Tensor, axis: int) -> bool:
    return a.dim() == b.dim() and all(
        x == y for d, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if d != axis
    )


def build(seed: int) -> tuple[fx.GraphModule, Builder]:
    """The program of a seed."""
    builder = Builder(seed)
    for number in range(builder.rng.randrange(1, 4)):
        builder.add_input(f"user_{number}", user=True)
    for number in range(builder.rng.randrange(1, 4)):
        builder.add_input(f"cand_{number}", user=False)
    first = builder.pool[0][0]
    builder.size = builder.graph.call_function(aten.sym_size.int, (first, 0))
    builder.size.meta["val"] = BATCH
    for _ in range(builder.rng.randrange(10, 60)):
        try:
            builder.step()
        except (LookupError, RuntimeError, IndexError):
            continue
    results = [node for node, _ in builder.pool[-3:]]
    builder.graph.output(tuple(results))
    return fx.GraphModule(builder.root, builder.graph), builder


def check(seed: int) -> str | None:
    """Rewrite and compare the program of a seed; why it is wrong, or None."""
    module, builder = build(seed)
    outcome = walk(module, Declared(frozenset(builder.user_inputs)))
    rewritten = fx.GraphModule(module, outcome.graph)
    generator = torch.Generator().manual_seed(seed + 1)
    for batch, users in ((7, 3), (5, 1), (4, 4), (9, 11), (1, 1)):
        index = torch.randint(0, users, (batch,), generator=generator)
        compact, full = [], []
        for shape, user in builder.shapes.values():
            rows = torch.randn((users if user else batch, *shape), generator=generator, dtype=torch.float64)
            compact.append(rows)
            full.append(rows[index] if user else rows)
        expected = fx.Interpreter(module).run(*full)
        got = fx.Interpreter(rewritten).run(*compact, index)
        for position, (a, b) in enumerate(zip(expected, got, strict=True)):
            if a.shape != b.shape:
                return f"B={batch} U={users} output {position}: shape {tuple(b.shape)}, expected {tuple(a.shape)}"
            scale = max(1.0, float(a.abs().max()))
            if not torch.allclose(a, b, rtol=1e-7, atol=1e-8 * scale, equal_nan=True):
                return f"B={batch} U={users} output {position}: off by {float((a - b).abs().max()):.3g} of {scale:.3g}"
    return None


def main() -> None:
    """Run many seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=2000, help="number of programs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, wrong = time.perf_counter(), 0
    for seed in range(options.seed, options.seed + options.count):
        try:
            reason = check(seed)
        except Exception as error:  # every crash counts as a wrong program
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        if reason:
            wrong += 1
            print(f"seed {seed}: {reason}")
    print(f"{options.count} programs, {wrong} wrong, {time.perf_counter() - start:.0f} s")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
