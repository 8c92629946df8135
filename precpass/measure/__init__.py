"""What a program does and takes: counts, time, memory, kernels, roofline."""
