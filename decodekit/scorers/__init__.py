"""Scorers, one a file."""
