"""The algebra: values, rules and the walk. No input or output."""

from ikbo_cli.broadcast.context import EagerContext, Refusal, SiteRecord
from ikbo_cli.broadcast.registry import REWRITES, Rewrite, load_rules, rewrite, rule
from ikbo_cli.broadcast.values import Broadcast, Concat, Full, Scalar, Sum, Uniform
from ikbo_cli.broadcast.walk import Declared, Walk, walk

__all__ = [
    "REWRITES",
    "Broadcast",
    "Concat",
    "Declared",
    "EagerContext",
    "Full",
    "Refusal",
    "Rewrite",
    "Scalar",
    "SiteRecord",
    "Sum",
    "Uniform",
    "Walk",
    "load_rules",
    "rewrite",
    "rule",
    "walk",
]
