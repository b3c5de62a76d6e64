"""Ranking models of our own, each a small script that writes its `.pt2`."""
