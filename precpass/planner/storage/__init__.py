"""Which values are stored in 16 bits, and where casts stand."""
