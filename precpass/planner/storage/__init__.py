"""Which values are stored in 16 bits, and where casts stand: a minimum cut."""
