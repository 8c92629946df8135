"""Monitors values while a program runs: overflow, underflow, and rules that follow from them."""
