"""How a checkpoint lies on disk. Reads headers and indexes, never a tensor's bytes."""
