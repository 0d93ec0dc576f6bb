"""Plots the curves of runs: a page for a browser, and the live board of all runs."""
