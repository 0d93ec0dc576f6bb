"""Evaluates and compares models: losses, tasks, intervals, a page of samples."""
