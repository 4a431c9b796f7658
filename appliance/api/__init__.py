"""HTTP API for scripts, OpenAI-compatible."""
