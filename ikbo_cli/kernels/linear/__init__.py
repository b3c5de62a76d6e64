"""Candidate linear plus a user addend."""
