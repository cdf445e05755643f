"""The way from a prompt to text, one file a stage."""
