"""The transfer of extents between nodes.

Other folders use `link` (a node's server and reports), `client` (extents from peers), `fetch_queue` and `sources` (the
next extent and its source), and `messages` with the addresses of `protocol` (between keepers and the registry).
"""
