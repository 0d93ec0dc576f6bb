"""Plots the curves of runs: a page for a browser, a picture, or a live page."""
