"""What is true of a program, apart from any policy."""
