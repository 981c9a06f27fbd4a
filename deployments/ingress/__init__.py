"""The clients' protocols: HTTP and gRPC to records, and back."""
