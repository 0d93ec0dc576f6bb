"""Ranks: process groups, monitoring, the machine's resources, and a coordinated shutdown."""
