"""Sweeps: runs of train.py that differ in some options, compared by a metric of their validations."""
