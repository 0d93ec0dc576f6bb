"""Continual learning: a model trains on tasks one after the other, and every set is measured after every task.

In: one YAML file that names tasks and methods. Out: a matrix of results, a page, models; each stage is a child process
of another program, and is not repeated when the experiment is started again.
"""
