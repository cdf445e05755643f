"""What a cache format costs in quality, measured on a model and a text: see docs/report.md."""
