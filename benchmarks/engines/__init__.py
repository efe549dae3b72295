"""Measurements on real engines."""
