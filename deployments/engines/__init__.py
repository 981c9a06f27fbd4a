"""Model execution: torch + weights + configs only, never Ray, FastAPI or `cluster`."""
