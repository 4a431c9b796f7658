"""Keys for scripts: issue, authenticate, revoke."""
