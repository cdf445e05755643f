"""Convert a checkpoint to another format of weights."""
