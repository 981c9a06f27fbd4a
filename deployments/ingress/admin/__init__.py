"""The HTTP routes of operators."""
