"""A plan held against the program that XLA made of it."""
