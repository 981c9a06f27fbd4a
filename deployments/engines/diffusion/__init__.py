"""Diffusion pipelines as a loop over denoise steps."""
