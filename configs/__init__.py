"""The configuration: strict pydantic models and YAML presets. A leaf: no torch, no Ray."""
