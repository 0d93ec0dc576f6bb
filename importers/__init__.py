"""Configurations of other trainers, translated into this one's options."""
