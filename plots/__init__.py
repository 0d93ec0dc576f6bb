"""Files of runs -> their curves: a page for a browser, a picture, or a page that follows runs as they go."""
