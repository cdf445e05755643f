"""Any mlx-lm model through kvant's cache."""
