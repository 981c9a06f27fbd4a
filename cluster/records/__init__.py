"""What the rooms of the cluster speak of: names, errors, failures, pins and freezes. Pure."""
