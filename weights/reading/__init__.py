"""Reading extents from storage into memory, verified on the way."""
