"""Tools that work on stored models, away from a cluster: smaller forms, and what a forward allocates."""
