"""Outputs: a user-side result is gathered at the very end."""

from __future__ import annotations

from ikbo_cli.broadcast.context import Context
from ikbo_cli.broadcast.registry import rewrite
from ikbo_cli.broadcast.values import Broadcast, Node


@rewrite("IKB111", "broadcast-before-output", status="stable")
def user_output(ctx: Context, value: Broadcast) -> Node:
    """An output that depends on the user alone.

    before:  tower(x_user[idx])         tower runs on B rows
    after:   tower(x_user)[idx]         tower runs on U rows; the output keeps its B rows
    Valid when: always.
    Saves: all of the tower's work on B - U rows.
    Numerics: the same operations on the same values.
    Source: In-Kernel Broadcast Optimization (Meta, 2026).
    """
    ctx.allow("IKB111", value, optional=False)
    return ctx.materialize(value)
