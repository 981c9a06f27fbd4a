"""Placement: which model is on which worker, and how many workers there are. Only `serving` acts."""
