"""Devices: what they can do, and on which one a call runs."""
