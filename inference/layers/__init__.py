"""Modules that the architectures are built from."""
