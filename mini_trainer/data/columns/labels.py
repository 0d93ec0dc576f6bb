"""The label of untrained tokens."""

IGNORED = -100  # label of a token that is not trained
