"""Gradients -> new weights."""
