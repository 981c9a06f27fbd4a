"""Stored programs as models: their graphs over the node's views, rows of many requests in one call."""
