"""A program as a picture: its equations in boxes, laid out and drawn."""
