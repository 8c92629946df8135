"""Which lowered equations make a result wrong."""
