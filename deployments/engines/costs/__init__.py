"""What steps cost: time, memory, threads."""
