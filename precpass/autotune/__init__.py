"""Times of products on the device, and forms of programs by its compiler, stored in files."""
