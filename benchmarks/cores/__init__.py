"""Measurements of the decision code and in virtual time."""
