"""Members and admins: users, sign-in, set-up and invitation links."""
