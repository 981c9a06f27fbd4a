"""What every process of a cluster has: logs, traces, metrics, calls of actors."""
