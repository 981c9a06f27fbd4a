"""Extents from node to node."""
