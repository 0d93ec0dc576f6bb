"""Pages for a browser: what all of them share."""
