"""Problems of options that are each possible: out of range, without effect, or contradicting others."""
