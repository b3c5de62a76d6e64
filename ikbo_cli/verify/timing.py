"""Timing on a CPU: original and optimized in turn, after warm-up; and the peak memory of one call."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.profiler import ProfilerActivity, profile

from ikbo_cli.results import SpeedResult
from ikbo_cli.verify.graphs import inlined

WARM_UP = 2
BUDGET_S = 4.0
MIN_TRIALS, MAX_TRIALS = 7, 50


class CompileFailed(Exception):
    """`torch.compile` cannot compile one of the programs here; carries the first line of its error."""


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

    Returns:
        Medians in microseconds; `spread` is the wider of the two interquartile ranges, each over its median.

    Raises:
        CompileFailed: in mode `compile`, at the first call.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            calls = [_callable(original, original_args, mode), _callable(optimized, optimized_args, mode)]
            times = _interleaved(calls, trials)
    finally:
        torch.set_num_threads(before)
    first, second = statistics.median(times[0]), statistics.median(times[1])
    spread = max(_spread(times[0]), _spread(times[1]))
    return SpeedResult(mode, "cpu", threads, batch, users, first, second, first / second, estimated, spread)


def _interleaved(calls: Sequence[Callable[[], Any]], trials: int | None) -> list[list[float]]:
    """Microseconds of every call, in turn: what else the machine does hits both alike."""
    for call in calls:
        for _ in range(WARM_UP):
            call()
    start = time.perf_counter()
    for call in calls:
        call()
    once = time.perf_counter() - start
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(trials or int(max(MIN_TRIALS, min(MAX_TRIALS, BUDGET_S / max(once, 1e-6))))):
        for position, call in enumerate(calls):
            start = time.perf_counter()
            call()
            times[position].append((time.perf_counter() - start) * 1e6)
    return times


def _callable(module: fx.GraphModule, args: Sequence[Any], mode: str) -> Callable[[], Any]:
    graph = _flat(module)
    if mode == "eager":
        return lambda: graph(*args)
    compiled = torch.compile(graph, dynamic=False)
    try:
        compiled(*args)
    except Exception as error:  # whatever the compiler and its back ends raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CompileFailed(lines[0][:200]) from error
    return lambda: compiled(*args)


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
    """Most bytes allocated at once during one call, inputs and weights not counted.

    Taken from the allocator's own events, because these see what ops allocate inside themselves (a recurrent layer's
    gates, the scores of an attention) and are the same in every run; the resident size of the process is neither.
    """
    graph = _flat(inlined(module))
    with torch.no_grad(), _silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        graph(*args)
    events = record.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    live = peak = 0
    for _, size in sizes:
        live += size
        peak = max(peak, live)
    return peak


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep the profiler's own log lines, written below Python, off stderr."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
