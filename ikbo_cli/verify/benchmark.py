"""Timing on a CPU: original and optimized in turn, after warm-up; and the peak memory of one call."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from ikbo_cli.results import SpeedResult

WARM_UP = 2
BUDGET_S = 4.0
MIN_TRIALS, MAX_TRIALS = 7, 50


def benchmark(
    original: fx.GraphModule,
    optimized: fx.GraphModule,
    original_args: Sequence[Any],
    optimized_args: Sequence[Any],
    *,
    mode: str,
    threads: int,
    batch: int,
    users: int,
    trials: int | None,
    estimated: float | None,
) -> SpeedResult:
    """Time both programs, interleaved.

    Args:
        original: The original program.
        optimized: The rewritten program.
        original_args: Flat inputs of the original.
        optimized_args: Flat inputs of the rewritten program.
        mode: `eager` or `compile`.
        threads: CPU threads.
        batch: Candidates, for the report.
        users: Users, for the report.
        trials: Timed calls of each; None fills a few seconds.
        estimated: Speedup that the cost model expects.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        calls = [_callable(original, original_args, mode), _callable(optimized, optimized_args, mode)]
        with torch.no_grad():
            for call in calls:
                for _ in range(WARM_UP):
                    call()
            start = time.perf_counter()
            for call in calls:
                call()
            once = time.perf_counter() - start
            count = trials or int(max(MIN_TRIALS, min(MAX_TRIALS, BUDGET_S / max(once, 1e-6))))
            times: list[list[float]] = [[], []]
            for _ in range(count):
                for position, call in enumerate(calls):
                    start = time.perf_counter()
                    call()
                    times[position].append((time.perf_counter() - start) * 1e6)
    finally:
        torch.set_num_threads(before)
    first, second = statistics.median(times[0]), statistics.median(times[1])
    return SpeedResult(mode, "cpu", threads, batch, users, first, second, first / second, estimated, _spread(times[1]))


def _callable(module: fx.GraphModule, args: Sequence[Any], mode: str) -> Any:
    graph = _flat(module)
    run = torch.compile(graph, dynamic=False) if mode == "compile" else graph
    return lambda: run(*args)


def _flat(module: fx.GraphModule) -> fx.GraphModule:
    """The same program with flat inputs and outputs: no tree handling and no guards in the timed call."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "call_module" and node.target == "_guards_fn":
            continue
        mapping[node] = graph.node_copy(node, lambda n: mapping[n])
    return fx.GraphModule(module, graph)


def _spread(times: Sequence[float]) -> float:
    """Interquartile range over the median."""
    ordered = sorted(times)
    low, high = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]
    return (high - low) / max(statistics.median(ordered), 1e-9)


def peak_bytes(module: fx.GraphModule, args: Sequence[Any]) -> int:
    """Most bytes of results alive at once during one call, inputs and weights not counted."""
    tracker = _Tracker()
    with torch.no_grad(), tracker:
        _flat(module)(*args)
    return tracker.peak


class _Tracker(TorchDispatchMode):
    """Counts storages as ops create them and as they are freed: exact, and the same in every run."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs or {})):
            if isinstance(tensor, torch.Tensor):
                self._known.add(tensor.untyped_storage()._cdata)
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
