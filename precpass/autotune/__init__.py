"""Which products pay on a device: times, measured once and kept."""
