"""Pipelines of diffusers that have no family here, run by diffusers' own code."""
