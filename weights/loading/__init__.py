"""Ways from bytes to tensors beside `weights.loading.loader`: given memory, devices, transforms, mapped files."""
