"""A function that runs in low precision, and again in a higher one if a check fails."""
