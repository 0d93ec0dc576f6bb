"""Problems with option values: out of range, without effect, or contradicting others."""
