"""The models of a cluster: how they come, change and go, and how everybody hears of it."""
