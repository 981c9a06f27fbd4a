"""How weight files lie on disk: headers and indexes, read strictly and without the tensors; files written again."""
