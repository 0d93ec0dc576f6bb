"""A model directory -> a sharded model that trains."""
