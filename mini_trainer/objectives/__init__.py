"""What is learned from a micro-batch."""
