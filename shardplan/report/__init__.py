"""What a person or a program reads of a plan: numbers with units, plain-text tables, progress."""
