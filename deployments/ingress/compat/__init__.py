"""Edges for clients of other servers over the same service. Each is a file that the config can switch off."""
