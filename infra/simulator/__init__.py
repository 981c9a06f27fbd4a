"""The cluster under a virtual clock: the controller's own functions, beside what others do, on the same trace."""
