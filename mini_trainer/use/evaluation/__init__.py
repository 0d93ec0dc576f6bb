"""Models measured side by side: losses, tasks, intervals, a page of samples."""
