"""A function in low precision, with a check, and in a wider one where that fails."""
