"""Speedup against ratio, and the ratio from which the rewrite pays."""

from __future__ import annotations

from ikbo_cli.cost import Device
from ikbo_cli.results import CurvePoint
from ikbo_cli.transform.plan import Plan, cost_pair
from ikbo_cli.transform.workload import Wanted, bind

RATIOS = (1, 2, 5, 10, 30, 100, 300, 1000, 3000, 10_000)
RATIOS_OF_LARGE_PROGRAMS = (1, 10, 100, 10_000)
LARGE_PROGRAM_NODES = 1500


def speedup_curve(plan: Plan, wanted: Wanted, device: Device) -> tuple[tuple[CurvePoint, ...], float | None]:
    """Estimated speedup at several ratios (batch fixed; above it, batch = ratio and one user).

    Returns:
        The points, and the lowest ratio from which the rewrite pays (interpolated); None if it never does.
    """
    large = len(plan.original.graph.nodes) > LARGE_PROGRAM_NODES
    points = []
    for ratio in RATIOS_OF_LARGE_PROGRAMS if large else RATIOS:
        batch = max(wanted.batch, ratio)
        sizes, _ = bind(plan.walk, plan.original, Wanted(batch, max(1, -(-batch // ratio)), False))
        before, after = cost_pair(plan.original, plan.module, plan.walk, sizes, device)
        points.append(CurvePoint(ratio, before.time_us / max(after.time_us, 1e-9)))
    return tuple(points), break_even(points)


def break_even(points: list[CurvePoint]) -> float | None:
    """The lowest ratio from which the speedup stays above one."""
    if points[-1].speedup <= 1:
        return None
    position = len(points) - 1
    while position > 0 and points[position - 1].speedup > 1:
        position -= 1
    if position == 0:
        return float(points[0].ratio)
    low, high = points[position - 1], points[position]
    share = (1 - low.speedup) / max(high.speedup - low.speedup, 1e-9)
    return low.ratio + share * (high.ratio - low.ratio)
