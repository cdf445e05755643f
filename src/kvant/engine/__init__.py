"""The path from a prompt to text, with one file per stage."""
