"""What a graph costs on a device: FLOPs, bytes, launches, time and peak memory.

Time is a roofline per kernel: the slower of arithmetic and memory, plus the launch. Two modes: eager (every op is a
kernel, as PyTorch runs on a CPU) and compiled (pointwise ops and the gathers that feed them fuse with their producer
or consumer, as `torch.compile` does).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ikbo_cli.cost.devices import Device
from ikbo_cli.cost.flops import GEMM, MAYBE_VIEWS, VIEWS, elementwise_work, op_name
from ikbo_cli.cost.trace import Spec, trace
from ikbo_cli.results import Cost

aten = torch.ops.aten

FRESH_BYTES = 32 << 20
"""Above this, the C allocator maps new pages for every result; touching them costs more than the copy."""
FRESH_GB_PER_S = 2.6

_GATHERS = {
    aten.index_select.default, aten.index.Tensor, aten.embedding.default, aten.gather.default,
    aten.index_copy.default, aten.repeat_interleave.self_int,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GraphCost:
    """Cost of a whole graph, and each node's share of it."""

    flops: float
    bytes: float
    peak_bytes: int
    time_us: float
    kernels: int
    by_node: dict[fx.Node, Cost]


def cost_graph(
    module: fx.GraphModule,
    inputs: Sequence[Spec],
    device: Device,
    *,
    compiled: bool,
    sizes: dict[str, int] | None = None,
) -> GraphCost:
    """Estimate one call of a program.

    Args:
        module: The unlifted program.
        inputs: Shape and dtype of every input, in flat order.
        device: What it runs on.
        compiled: Fuse as a compiler does, or run op by op.
        sizes: Values of symbols that only data determine.
    """
    values = trace(module, inputs, sizes)
    by_node: dict[fx.Node, Cost] = {}
    kernels = 0
    for node in module.graph.nodes:
        if node.op != "call_function" or _is_free(node, values):
            continue
        fused = compiled and _fuses(node)
        cost = _node_cost(node, values, device, fused=fused)
        by_node[node] = cost
        kernels += not fused
    return GraphCost(
        sum(c.flops for c in by_node.values()),
        sum(c.bytes for c in by_node.values()),
        peak_bytes(module, values),
        sum(c.time_us for c in by_node.values()),
        kernels,
        by_node,
    )


def _is_free(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    if node.target in VIEWS or not isinstance(node.target, torch._ops.OpOverload):
        return True
    if node.target in MAYBE_VIEWS:
        source = node.args[0]
        before = values.get(source) if isinstance(source, fx.Node) else None
        after = values.get(node)
        if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
            return before.dtype == after.dtype and before.is_contiguous()
    return not isinstance(values.get(node), (torch.Tensor, list, tuple))


def _fuses(node: fx.Node) -> bool:
    """Whether a compiler computes the node inside its only consumer."""
    if node.target in GEMM or len(node.users) != 1 or node.target is aten.cat.default:
        return False
    consumer = next(iter(node.users))
    return consumer.op == "call_function" and consumer.target not in GEMM


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return []


def _size_bytes(tensor: torch.Tensor) -> int:
    # An expanded axis is read once.
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()


def _node_cost(node: fx.Node, values: dict[fx.Node, Any], device: Device, *, fused: bool) -> Cost:
    args: Any = fx.map_arg(node.args, lambda n: values.get(n))
    outputs = _tensors(values.get(node))
    inputs = [t for n in node.all_input_nodes for t in _tensors(values.get(n))]
    written = float(sum(t.numel() * t.element_size() for t in outputs))
    read = float(sum(_size_bytes(t) for t in inputs))
    if node.target in _GATHERS:
        table = _size_bytes(inputs[0]) if inputs else 0
        read = read - table + min(written, table)
    elements = max([t.numel() for t in outputs] + [t.numel() for t in inputs if node.target not in _GATHERS] + [0])
    formula = GEMM.get(node.target)
    dtype = next((t.dtype for t in outputs if t.dtype.is_floating_point), torch.float32)
    if formula is not None:
        try:
            flops = formula(args, outputs[0])
        except (IndexError, AttributeError, TypeError):
            flops = 0.0
        compute = flops / (device.gemm_rate(dtype) * _efficiency(node, args, outputs, dtype, device))
        if op_name(node.target) == "scaled_dot_product_attention" and outputs:
            scores = args[0].numel() / args[0].shape[-1] * args[1].shape[-2]
            compute += scores * elementwise_work(aten.softmax.int) / (device.vector_gflops * 1e3)
    else:
        flops = 0.0 if node.target in _GATHERS or node.target is aten.cat.default else float(elements)
        compute = flops * elementwise_work(node.target) / (device.vector_gflops * 1e3)
        if device.kind == "gpu":
            compute = flops / (device.vector_gflops * 1e3)
    moved = 0.0 if fused else read + written
    memory = moved / (device.memory_gb_per_s * 1e3)
    launch = 0.0 if fused else device.launch_us
    if device.kind == "cpu":
        fresh = sum(t.numel() * t.element_size() for t in outputs if t.numel() * t.element_size() >= FRESH_BYTES)
        in_place = getattr(node.target, "_schema", None) is not None and node.target._schema.is_mutable  # type: ignore[union-attr]
        total = max(compute, memory) + (0.0 if in_place else fresh / (FRESH_GB_PER_S * 1e3)) + launch
    else:
        total = max(compute, memory) + launch
    bound = "launch" if launch > max(compute, memory) else "compute" if compute >= memory else "memory"
    return Cost(flops, moved, total, bound)


def _efficiency(
    node: fx.Node, args: Sequence[Any], outputs: Sequence[torch.Tensor], dtype: torch.dtype, device: Device
) -> float:
    """Fraction of the large-matrix rate that this product reaches."""
    name = op_name(node.target)
    out = outputs[0]
    if name == "scaled_dot_product_attention":
        rows, depth, columns, batch = (
            args[0].shape[-2],
            args[0].shape[-1],
            args[1].shape[-2],
            out.numel() // max(1, out.shape[-1] * out.shape[-2]),
        )
    elif name == "linear":
        rows, depth, columns, batch = (
            out.numel() // max(1, out.shape[-1]),
            args[0].shape[-1],
            out.shape[-1],
            1,
        )
    elif name in ("bmm", "matmul", "mm") and out.dim() >= 2:
        rows, depth, columns = out.shape[-2], args[0].shape[-1], out.shape[-1]
        batch = out.numel() // max(1, rows * columns)
        if args[1].dim() == 2:
            rows, batch = rows * batch, 1
    else:
        return 0.6
    if device.kind == "gpu":
        aligned = dtype == torch.float32 or (depth % 8 == 0 and columns % 8 == 0)
        fill = min(1.0, rows * columns * batch / (128 * 128 * 132))
        return max(0.02, fill * (1.0 if aligned else device.unaligned))
    # One core: tiles of 16 rows and columns; batches of vectors run at memory speed of the cache.
    if batch > 1:
        base = 0.12 if rows <= 1 else 0.95 * min(1.0, rows / 32) ** 0.5
        if name == "scaled_dot_product_attention":
            base = 0.08 if rows <= 1 else 0.75 * min(1.0, rows / 64) ** 0.5
        return max(0.02, min(1.0, base))
    return max(
        0.05,
        min(1.0, (columns / 80) ** 0.5 if columns < 80 else 1.0)
        * (0.7 if rows < 32 else 1.0)
        * (0.78 if depth * columns < 30_000 or rows > 20_000 else 1.0),
    )


def peak_bytes(module: fx.GraphModule, values: dict[fx.Node, Any]) -> int:
    """Most bytes alive at once: weights and inputs throughout, results until their last reader; views share memory."""
    owner: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    nodes = list(module.graph.nodes)
    for position, node in enumerate(nodes):
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        shares = source is not None and (
            node.target in VIEWS or node.target is operator.getitem or _is_free(node, values)
        )
        owner[node] = owner[source] if shares and source is not None and node.op == "call_function" else node
        for used in node.all_input_nodes:
            last[owner[used]] = position
    live = 0
    peak = 0
    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            live += sum(t.numel() * t.element_size() for t in _tensors(values.get(node)))
    ends: dict[int, list[fx.Node]] = {}
    for node, position in last.items():
        ends.setdefault(position, []).append(node)
    for position, node in enumerate(nodes):
        if node.op == "call_function" and owner[node] is node:
            live += sum(t.numel() * t.element_size() for t in _tensors(values.get(node)))
        peak = max(peak, live)
        for done in ends.get(position, []):
            if done.op == "call_function":
                live -= sum(t.numel() * t.element_size() for t in _tensors(values.get(done)))
    return peak
