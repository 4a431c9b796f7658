"""The door to the engine: gateway, metered generation, serve command, health."""
