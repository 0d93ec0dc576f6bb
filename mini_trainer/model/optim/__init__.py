"""Optimization: gradient reduction, learning-rate schedules, optimizers."""
