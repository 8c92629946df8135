"""Loss scaling for float16: the scale, gradients under it, and a wrapper for optax."""
