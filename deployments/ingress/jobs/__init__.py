"""Jobs in the ingress: begun by requests, run through the same door, and told of."""
