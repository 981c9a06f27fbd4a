"""Bytes <-> tensors. A Ray-free library, usable alone: externalize a checkpoint, load it back, share it."""
