"""Values that the folders of the cluster share: names, errors, failures, pins and freezes. Pure."""
