"""Memory of hosts and devices: staging buffers, transfers, the device arena."""
