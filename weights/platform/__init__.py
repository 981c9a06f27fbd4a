"""Access to the machine and torch: dtypes, the seam to torch, the processor, private folders, durable writes."""
