"""The cost in quality of a cache format, measured on a model and a text."""
