"""Columns of tokenized data sets, by objective."""
