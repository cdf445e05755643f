"""Measuring speed: every token's latency, recorded, summed up and drawn."""
