"""Admission of requests: which of them are read, wait, start or are refused."""
