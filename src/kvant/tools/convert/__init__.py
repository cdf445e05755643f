"""A checkpoint to another format of weights."""
