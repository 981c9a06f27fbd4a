"""The transfer of extents between nodes.

Other folders use `link` (a node's server, client and reports), `fetch_queue` (what to get next, and from where) and
`messages` (what keepers and the registry tell each other).
"""
