"""The HTTP door of a cluster: HAProxy straight to the ingress replicas, with Serve's throughput settings."""
