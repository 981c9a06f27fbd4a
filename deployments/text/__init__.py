"""Text -> what encoders compute, each thing once. Free of Ray: the service and the local runner use it."""
