"""Dry run: estimates memory, time and disk; resolves "auto"."""
