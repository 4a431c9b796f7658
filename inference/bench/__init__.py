"""Measurements of the engine without any web: `python -m inference.bench --help`."""
