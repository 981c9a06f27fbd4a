"""HTTP <-> records: the protocols that clients speak."""
