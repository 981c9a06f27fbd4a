"""The transfer of extents between nodes.

Other folders use `link` (a node's server and reports), `client` (extents from peers), `fetch_queue` and `sources` (what
to get next, and from where), and `messages` with the addresses of `protocol` (what keepers and the registry tell each
other).
"""
