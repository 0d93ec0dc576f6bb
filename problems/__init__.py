"""What is wrong with options that are each possible: out of range, without effect, or at odds with others."""
