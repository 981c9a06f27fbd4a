"""Checkpoints that need torch or diffusers to be read: single files, a VAE of its own, torch's pickles."""
