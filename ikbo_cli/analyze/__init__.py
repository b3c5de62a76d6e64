"""Estimates beyond one workload: the curve of speedup against ratio."""
