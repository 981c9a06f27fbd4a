"""Text encodings of the whole cluster: who has them, who computes them, which of them stay."""
