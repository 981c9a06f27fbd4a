"""Tokens from logits: sampling and log probabilities."""
