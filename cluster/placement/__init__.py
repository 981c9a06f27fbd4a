"""Placement: which model is on which worker, and how many workers there are. Only actor.py and link.py act."""
