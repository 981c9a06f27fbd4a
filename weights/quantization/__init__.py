"""Number formats of weights, in numpy: float tensors to 8 bits and back."""
