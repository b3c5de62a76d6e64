"""Pairwise dot products of user and candidate fields."""
