"""Shared by all commands: tables, progress, the HTTP client, running clusters."""
