"""Tokenized data sets: written with a sidecar, kept in a cache, read back, mixed, ordered."""
