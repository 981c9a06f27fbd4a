"""The control of a cluster: who is admitted, what starts where, which model is on which worker. Pure."""
