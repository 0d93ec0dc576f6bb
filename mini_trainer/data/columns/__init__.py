"""Columns of tokenized data sets, by what a data set is for."""
