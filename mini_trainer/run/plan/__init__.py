"""What a run would need, and what "auto" becomes."""
