"""The decision as data: plans, decisions, reasons, and their file."""
