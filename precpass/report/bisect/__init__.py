"""The search for the lowered equations that make a result wrong."""
