"""Import of other trainers' configurations, translated into this one's options."""
