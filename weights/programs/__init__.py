"""Graphs whose constants are in the store: Const <-> FileConstant of Ascend GE, for torch.export and ONNX."""
