"""Dynamic batching: batches form at dispatch, and later arrivals join the next one."""
