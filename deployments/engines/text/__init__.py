"""Text to embeddings: CLIP, T5 and sentence encoders."""
