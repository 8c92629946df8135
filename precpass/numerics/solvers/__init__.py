"""Linear systems and least squares, each part in its own precision."""
