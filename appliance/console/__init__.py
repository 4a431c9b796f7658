"""Pages for admins: the live engine, tuning, users."""
