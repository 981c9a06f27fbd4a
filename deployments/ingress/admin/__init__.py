"""What operators ask of a cluster, over HTTP."""
