"""Times of products on the device, measured once and stored in a file."""
