"""From storage into memory, verified on the way."""
