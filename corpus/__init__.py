"""Rows of any file -> the tokenized data set on disk, and back."""
