"""Gather of a user addend, added to candidate rows."""
