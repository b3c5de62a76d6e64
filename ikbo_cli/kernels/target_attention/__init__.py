"""Attention of candidates over their user's keys and values, read through the index."""
