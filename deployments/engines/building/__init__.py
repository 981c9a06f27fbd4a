"""Modules built without initializing them, and kept for the next model of their structure."""
