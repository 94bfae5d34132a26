"""Work that several experiments time, or that is too long for one file."""
