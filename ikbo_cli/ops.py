"""Importing this module registers the `ikbo::` operators, which saved programs call by name."""

from ikbo_cli.kernels import __all__ as operators

__all__ = ["operators"]
