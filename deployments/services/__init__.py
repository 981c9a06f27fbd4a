"""The Serve deployments that run models."""
