"""Forwards as graphs: recorded, their memory planned."""
