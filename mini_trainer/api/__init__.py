"""The Python API: the programs as functions, which start them as child processes.

In: dataclasses whose fields are options, also under InstructLab's names. Out: results, or exceptions by exit code.
Imports nothing heavy.
"""
