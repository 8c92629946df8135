"""Forms of programs by a device's compiler, stored in files."""
