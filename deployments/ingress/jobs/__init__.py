"""Jobs in the ingress: requests begin them, the same application runs them, and routes show them."""
