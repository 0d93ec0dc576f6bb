"""Converts rows of any file to a tokenized data set on disk, and reads it back."""
