"""The costs of steps: time, memory, threads."""
