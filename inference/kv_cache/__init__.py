"""Blocks of KV memory: bookkeeping (no torch) and storage (torch)."""
