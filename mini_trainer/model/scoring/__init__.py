"""A model scored on tokenized data."""
