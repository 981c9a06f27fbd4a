"""Template processes: each has imported what a kind of Ray's workers needs, and Ray's workers are copies of it."""
