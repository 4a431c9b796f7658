"""Checkpoints: loading, name mapping, and the one-time import of GGUF files."""
