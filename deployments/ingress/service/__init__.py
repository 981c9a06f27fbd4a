"""The service behind all protocols."""
