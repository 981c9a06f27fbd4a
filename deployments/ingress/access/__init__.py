"""Access: API keys, what each may do, and how often. Keys, limits and decisions are pure; HTTP and gRPC ask them."""
