"""A decode engine in virtual time."""
