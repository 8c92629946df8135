"""What is asked for: a preset, rules, a saved plan, and the table of primitives."""
