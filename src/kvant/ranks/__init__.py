"""A model on several machines: one process each, a rank, over MLX's distributed back ends."""
