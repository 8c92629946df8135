"""Measurements of a program: counts, time, memory, kernels, roofline."""
