"""Converts messages and a chat template to token ids and a loss mask."""
