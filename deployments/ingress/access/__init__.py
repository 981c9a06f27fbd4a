"""Access: API keys with their rights and limits. Keys, limits and decisions are pure; HTTP and gRPC use them."""
