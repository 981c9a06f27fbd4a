"""What a keeper is made of."""
