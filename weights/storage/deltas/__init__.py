"""Deltas: extents of a model stored as their lossless difference from those of a sibling."""
