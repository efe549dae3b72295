"""A whole fleet in virtual time."""
