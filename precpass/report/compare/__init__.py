"""Policies side by side: errors, times, memory."""
