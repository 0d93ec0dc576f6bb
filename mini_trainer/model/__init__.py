"""Building, checking and sharding a trainable model from a model directory."""
