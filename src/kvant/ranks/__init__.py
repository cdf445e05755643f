"""A model on several machines: one process (rank) each, over MLX's distributed backends."""
