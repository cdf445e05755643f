"""Measure this machine and a model into one file, and check such files."""
