"""Admission: which requests are read, wait, start and are refused."""
