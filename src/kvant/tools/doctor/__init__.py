"""Diagnose the machine, every operator's path, and whether the fused kernel is right."""
