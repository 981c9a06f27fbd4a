"""File formats of weights: headers and indexes, read strictly and without the tensors; files written again."""
