"""What a graph costs on a device: FLOPs, bytes, launches, time, peak memory."""

from ikbo_cli.cost.devices import Device, get_device
from ikbo_cli.cost.estimate import GraphCost, cost_graph
from ikbo_cli.cost.flops import register_flops
from ikbo_cli.cost.trace import Spec, trace

__all__ = ["Device", "GraphCost", "Spec", "cost_graph", "get_device", "register_flops", "trace"]
