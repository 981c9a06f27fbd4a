"""Sequences, and the paged cache of their keys and values."""
