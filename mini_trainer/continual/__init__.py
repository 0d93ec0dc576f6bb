"""Continual learning: a model trains on tasks one after the other, and every set is measured after every task."""
