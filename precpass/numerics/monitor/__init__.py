"""What values do while a program trains: overflow, underflow, and the rules that follow."""
