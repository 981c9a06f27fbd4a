"""Shared by all replicas: step loop, output channels, calls of other replicas."""
