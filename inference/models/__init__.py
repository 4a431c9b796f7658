"""Model architectures, one a file, behind a registry."""
