"""Proof that a rewritten program computes what the original does, and measurement of both."""

from ikbo_cli.verify.cases import RatioCase, ratio_cases
from ikbo_cli.verify.check import verify_modules
from ikbo_cli.verify.pairs import find_pair
from ikbo_cli.verify.reference import run_reference

__all__ = ["RatioCase", "find_pair", "ratio_cases", "run_reference", "verify_modules"]
