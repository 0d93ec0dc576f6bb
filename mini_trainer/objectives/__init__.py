"""Objectives: what is learned from samples; families: what of a model reads a packed row.

In: samples, hidden states and a head. Out: micro-batches, summed losses, the number that they are divided by, and what
a validation reports. objectives/specs.py is the table.
"""
