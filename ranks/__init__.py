"""Which process is which, who watches it, what its machine has, and how all end together."""
