"""Shared by all processes of a cluster: logs, traces, metrics, calls of actors."""
