"""The shared cache of text encodings: entries, claims on computing them, eviction.

Other folders use `actor` (connect to the cache) and `ray_tier` (a replica's client of it), with their `records` and
`packed` tensors. A replica's own tier keeps what it has by the same `eviction`, and asks the client where `worth` says.
"""
