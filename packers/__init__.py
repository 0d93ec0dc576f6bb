"""The compiled searches of `batch_packer.pack_batch`."""
