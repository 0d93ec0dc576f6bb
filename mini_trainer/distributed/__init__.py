"""Processes: which is which, what they agree on, who is gone, and how all of them end together.

In: options, and torchrun's environment. Out: a `World`, one exit code, one message; locks, monitors, child processes.
Nothing here knows of models or data.
"""
