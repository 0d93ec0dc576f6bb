"""Compiled search algorithms of `batch_packer.pack_batch`."""
