"""What the machine and torch give: dtypes, the seam to torch, the processor, private folders, durable writes."""
