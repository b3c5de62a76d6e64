"""Proof that a rewritten program computes what the original does, and measurement of both."""

from ikbo_cli.verify.bisection import bisect
from ikbo_cli.verify.cases import RatioCase, ratio_cases
from ikbo_cli.verify.check import compare, verify_modules, verify_programs
from ikbo_cli.verify.inputs import CaseInputs, make_inputs
from ikbo_cli.verify.pairs import find_pair
from ikbo_cli.verify.reference import run_reference
from ikbo_cli.verify.timing import benchmark, peak_bytes

__all__ = [
    "CaseInputs",
    "RatioCase",
    "benchmark",
    "bisect",
    "compare",
    "find_pair",
    "make_inputs",
    "peak_bytes",
    "ratio_cases",
    "run_reference",
    "verify_modules",
    "verify_programs",
]
