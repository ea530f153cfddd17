"""Utilities, one a file."""
