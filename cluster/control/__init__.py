"""The control of a cluster: who is admitted, what starts where, and which model is on which worker."""
