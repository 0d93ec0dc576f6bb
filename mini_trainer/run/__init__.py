"""The life of a run, from its lock to its last export."""
