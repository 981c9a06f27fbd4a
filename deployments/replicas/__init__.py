"""What every replica has: its step loop, its output channels, calls of other replicas."""
