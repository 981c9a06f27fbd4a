"""One model computed by several processes, its ranks: who computes which part, and what they send each other."""
