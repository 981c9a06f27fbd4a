"""Checkpoints in smaller types: what `atelier quantize` writes."""
