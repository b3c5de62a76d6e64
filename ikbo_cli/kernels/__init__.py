"""Operators that read user rows through the candidate index, usable on their own.

Each runs as aten operators anywhere and as Triton kernels on a GPU; Triton is imported at the first launch.
"""

from ikbo_cli.kernels.din_unit.op import broadcast_din_unit
from ikbo_cli.kernels.dot_interaction.op import broadcast_dot_interaction
from ikbo_cli.kernels.gather_add.op import broadcast_gather_add
from ikbo_cli.kernels.group.op import group_candidates
from ikbo_cli.kernels.lce.op import broadcast_lce
from ikbo_cli.kernels.linear.op import broadcast_linear
from ikbo_cli.kernels.target_attention.op import broadcast_target_attention

__all__ = [
    "broadcast_din_unit",
    "broadcast_dot_interaction",
    "broadcast_gather_add",
    "broadcast_lce",
    "broadcast_linear",
    "broadcast_target_attention",
    "group_candidates",
]
