"""Measure the latency of every token; record, summarize and plot it."""
