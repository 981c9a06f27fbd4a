"""Text -> conditioning and embeddings; each encoding is computed once. Only `client.py` knows Ray."""
