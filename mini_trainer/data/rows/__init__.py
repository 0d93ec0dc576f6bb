"""Rows of any file become a tokenized data set on disk."""
