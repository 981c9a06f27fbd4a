"""The shared cache of text encodings: entries, claims on computing them, eviction."""
