"""Answers of models: prompts from rows, engines, and the files that answers are kept in."""
