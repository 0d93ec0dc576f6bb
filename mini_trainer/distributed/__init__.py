"""Processes: ranks, their agreement, detection of dead ones, and a common end.

In: options, and torchrun's environment. Out: a `World`, one exit code, one message; locks, monitors, child processes.
Nothing here knows about models or data.
"""
