"""Common parts of HTML pages."""
