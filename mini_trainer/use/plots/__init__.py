"""Plots the curves of runs: a page for a browser, a figure, or a live page."""
