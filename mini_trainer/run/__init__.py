"""Runs: from the lock of an output directory to the last export.

In: options, a `World`. Out: steps, validations, checkpoints, exports, metrics, reports; plan/ estimates beforehand what
a run would need, with the same start-up code.
"""
