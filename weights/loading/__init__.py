"""Ways from bytes to tensors beside `weights.loader`: given memory, devices, transforms, mapped files."""
