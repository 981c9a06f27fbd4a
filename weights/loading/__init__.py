"""Ways from bytes to tensors beside `weights.loader`: given memory, devices, slices, transforms, mapped files."""
