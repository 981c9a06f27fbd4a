"""Networks that enlarge images, and the tiles that they go through."""
