"""Bodies read, answers written, terms of a request."""
