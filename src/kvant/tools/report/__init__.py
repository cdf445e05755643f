"""Measure how a cache format affects quality, with a model and a text."""
