"""The keeper of one node: `actor.py` is its interface, `ray_extents.py` the replica's side."""
