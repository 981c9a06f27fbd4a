"""The keeper of one node: `actor.py` is its face, `ray_extents.py` the replica's side."""
