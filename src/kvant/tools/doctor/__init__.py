"""What ``kvant doctor`` finds out: the machine, every operator's path, whether the fused kernel is right."""
