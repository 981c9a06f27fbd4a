"""The registry: the directory of models, and the map of which node holds which extents.

Other folders use `actor` (connect to the registry), `snapshot` (a copy that follows it) and `directory` (the records).
Nothing is re-exported here: an import process loads this folder without Ray.
"""
