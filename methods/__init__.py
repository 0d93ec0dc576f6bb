"""What of a model trains."""
