"""Plans and inspections as a person reads them: text, colour, HTML and pictures."""
