"""A run from its lock to its last export."""
