"""The kinds of nodes that are known: what they take and give, and one pure function each."""
