"""Files on disks and in object stores: read with limits, written whole, verified by hash."""
