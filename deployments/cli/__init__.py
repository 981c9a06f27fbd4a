"""The command `atelier`, one file per group of commands."""
