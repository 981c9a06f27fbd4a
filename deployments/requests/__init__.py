"""Limits and defaults of requests."""
