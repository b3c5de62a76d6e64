"""Stable grouping of candidates by user."""
