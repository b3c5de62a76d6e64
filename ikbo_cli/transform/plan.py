"""Planning: walk, cost both programs, decline what does not pay, and describe every site."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from ikbo_cli.broadcast import REWRITES, Declared, Refusal, SiteRecord, Walk, walk
from ikbo_cli.broadcast.values import shape_of
from ikbo_cli.cost import Device, GraphCost, cost_graph
from ikbo_cli.errors import UsageError
from ikbo_cli.program import module_path, source_location
from ikbo_cli.results import Cost, Site, Status, Totals
from ikbo_cli.transform.emit import build_module
from ikbo_cli.transform.workload import Sizes, Wanted, bind, new_specs, original_specs

TOLERATED_LOSS = 1.05
"""`fastest` declines what is estimated to lose more than this factor."""


@dataclasses.dataclass
class Plan:
    """The rewritten program in memory, and what it is expected to cost."""

    original: fx.GraphModule
    module: fx.GraphModule
    walk: Walk
    sites: tuple[Site, ...]
    sizes: Sizes
    before: GraphCost
    after: GraphCost
    changed: bool
    reason: str | None

    @property
    def speedup(self) -> float:
        """Estimated time of the original over that of the rewritten program."""
        return self.before.time_us / max(self.after.time_us, 1e-9)


def make_plan(
    original: fx.GraphModule,
    declared: Declared,
    wanted: Wanted,
    device: Device,
    *,
    policy: str = "always",
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
) -> Plan:
    """Plan the rewrite of a program.

    Args:
        original: The unlifted program.
        declared: Declared inputs.
        wanted: Workload that decisions are made for.
        device: Device they are made for.
        policy: `always` rewrites what is valid, `fastest` declines what is estimated to lose.
        only: Rules or site ids to rewrite; empty for all.
        skip: Rules or site ids to leave alone.
    """
    first = walk(original, declared)
    ids = {site.origin: f"S{position}" for position, site in enumerate(first.sites, 1)}
    _check_names([*only, *skip], ids)
    declined: dict[str, str] = {}
    decide = _decider(ids, only, skip, declined)
    best = _costed(original, declared, wanted, device, decide, ids)
    if policy == "fastest":
        for _ in range(3):
            losing = [s for s in best.sites if s.status == "rewritten" and s.rule not in LATE and _loses(s)]
            if not losing:
                break
            for site in losing:
                assert site.before and site.after
                loss = site.after.time_us / max(site.before.time_us, 1e-9)
                declined[site.node] = f"estimated {loss:.2f}x the time at this workload on this device"
            trial = _costed(original, declared, wanted, device, decide, ids)
            if trial.after.time_us >= best.after.time_us:
                for site in losing:
                    declined.pop(site.node)
                break
            best = trial
        best = _unless_slower(best, declared, wanted, device)
    if not any(site.status == "rewritten" for site in best.sites) and not best.walk.user_side:
        best = dataclasses.replace(best, changed=False, reason=best.reason or "no user-side work is repeated")
    return best


LATE = ("IKB107", "IKB111")


def _unless_slower(plan: Plan, declared: Declared, wanted: Wanted, device: Device) -> Plan:
    """Keep the original form where the whole rewrite is estimated to be slower than it."""
    if plan.after.time_us <= plan.before.time_us * TOLERATED_LOSS or not plan.sites:
        return plan
    loss = plan.after.time_us / plan.before.time_us
    reason = f"the rewritten program is estimated to take {loss:.2f}x the time at this workload on this device"
    if declared.user_inputs:
        kept = walk(plan.original, dataclasses.replace(declared, exploit=False))
        module = build_module(plan.original, kept)
        after = cost_graph(
            module,
            new_specs(kept, plan.sizes),
            device,
            compiled=device.kind == "gpu",
            sizes=plan.sizes.by_symbol,
        )
    else:
        kept, module, after = plan.walk, plan.original, plan.before
    sites = tuple(dataclasses.replace(site, status="declined", reason=reason, after=site.before) for site in plan.sites)
    return dataclasses.replace(plan, walk=kept, module=module, after=after, sites=sites, changed=False, reason=reason)


def _loses(site: Site) -> bool:
    return site.before is not None and site.after is not None and (
        site.after.time_us > site.before.time_us * TOLERATED_LOSS
    )  # fmt: skip


def _check_names(names: Sequence[str], ids: Mapping[str, str]) -> None:
    known = {*REWRITES, *ids.values()}
    for name in names:
        if name not in known:
            raise UsageError(
                f"{name!r} is neither a rule nor a site of this program",
                hint="rules: " + ", ".join(sorted(REWRITES)) + "; sites: " + (", ".join(ids.values()) or "none"),
            )


def _decider(
    ids: Mapping[str, str], only: Sequence[str], skip: Sequence[str], declined: Mapping[str, str]
) -> Callable[[str, str], Refusal | None]:
    def decide(code: str, origin: str) -> Refusal | None:
        name = ids.get(origin, "")
        if origin in declined:
            return Refusal(declined[origin], declined=True)
        if code in skip or name in skip:
            return Refusal("left alone by --skip", declined=True)
        if only and code not in only and name not in only:
            return Refusal("not named by --only", declined=True)
        return None

    return decide


def _costed(
    original: fx.GraphModule,
    declared: Declared,
    wanted: Wanted,
    device: Device,
    decide: Callable[[str, str], Refusal | None],
    ids: Mapping[str, str],
) -> Plan:
    outcome = walk(original, declared, decide)
    module = build_module(original, outcome)
    sizes, _ = bind(outcome, original, wanted)
    before, after = cost_pair(original, module, outcome, sizes, device)
    sites = tuple(
        describe(site, ids.get(site.origin, f"S{len(ids) + 1}"), original, sizes, before, after)
        for site in outcome.sites
    )
    return Plan(original, module, outcome, sites, sizes, before, after, True, None)


def cost_pair(
    original: fx.GraphModule, module: fx.GraphModule, outcome: Walk, sizes: Sizes, device: Device
) -> tuple[GraphCost, GraphCost]:
    """Cost of the original and of the rewritten program at the same workload."""
    compiled = device.kind == "gpu"
    before = cost_graph(original, original_specs(original, sizes), device, compiled=compiled, sizes=sizes.by_symbol)
    after = cost_graph(module, new_specs(outcome, sizes), device, compiled=compiled, sizes=sizes.by_symbol)
    return before, after


def describe(
    record: SiteRecord, name: str, original: fx.GraphModule, sizes: Sizes, before: GraphCost, after: GraphCost
) -> Site:
    """A site as it is reported."""
    nodes = {node.name: node for node in original.graph.nodes}
    node = nodes.get(record.origin)
    value = max(record.gathered or record.inputs, key=lambda b: torch.Size(b.shape).numel())
    expanded = sizes.shape(value.shape)
    source = nodes.get(value.source)
    status: Status = "rewritten"
    if record.code is None:
        assert record.refusal is not None
        unknown = record.refusal.reason.startswith("no rule")
        status = "declined" if record.refusal.declined else "unsupported" if unknown else "refused"
    produced = [n for n in record.emitted if n in after.by_node]
    feeding = [source] if source is not None and source.op == "call_function" else []
    originals = [n for n in ([node] if node is not None else []) + feeding if n in before.by_node]
    if node is not None:
        originals += [n for n in _written_inputs(node) if n in before.by_node and n not in originals]
    return Site(
        id=name,
        source_id=value.source,
        kind=REWRITES[record.code].name
        if record.code
        else "broadcast-before-" + record.op.split(".")[1 if "." in record.op else 0],
        op=record.op,
        node=record.origin,
        module=module_path(node) if node is not None else None,
        source=source_location(node) if node is not None else None,
        user_shape=sizes.shape(shape_of(value.node)),
        expanded_shape=expanded,
        materialized_bytes=torch.Size(expanded).numel() * value.dtype.itemsize,
        rule=record.code,
        status=status,
        reason=record.refusal.reason if record.refusal and record.code is None else None,
        before=_total([before.by_node[n] for n in originals]),
        after=_total([after.by_node[n] for n in produced]),
    )


def _written_inputs(node: fx.Node) -> list[fx.Node]:
    """The concats that an op reads: the original wrote them for it."""
    return [n for n in node.all_input_nodes if n.target in (torch.ops.aten.cat.default, torch.ops.aten.concat.default)]


def _total(costs: Sequence[Cost]) -> Cost:
    time = sum(c.time_us for c in costs)
    slowest = max(costs, key=lambda c: c.time_us, default=None)
    return Cost(sum(c.flops for c in costs), sum(c.bytes for c in costs), time, slowest.bound if slowest else "launch")


def totals(cost: GraphCost) -> Totals:
    """Totals as they are reported."""
    return Totals(cost.flops, cost.bytes, cost.peak_bytes, cost.time_us, cost.kernels)


def user_only(plan: Plan) -> Cost:
    """Cost of the work that now runs on compact rows."""
    costs = [cost for node, cost in plan.after.by_node.items() if node.meta.get("ikbo_origin") in plan.walk.user_side]
    return _total(costs)
