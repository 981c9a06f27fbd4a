"""Placement at work: the controller's actor, ingress replicas' link to it, the desk of slots."""
