"""Linear systems and least squares, with each role in a precision of its own."""
