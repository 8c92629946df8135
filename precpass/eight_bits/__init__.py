"""Matrix products in 8 bits: which there are, their scales and form, and values of 8 bits."""
