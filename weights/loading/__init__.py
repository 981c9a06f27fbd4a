"""Extents -> tensors, in the ways that `weights.loader` offers: given memory, devices, slices, transforms."""
