"""Ways from extents to tensors that `weights.loader` offers: given memory, devices, slices, transforms."""
