"""Objectives turn samples into losses; families run models on packed rows.

In: samples, hidden states and a head. Out: micro-batches, summed losses, their divisors, and the metrics of
validations. options/objectives.py is the table.
"""
