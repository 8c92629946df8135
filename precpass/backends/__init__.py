"""What each of XLA's compilers makes of a program, and the forms that one of them needs."""
