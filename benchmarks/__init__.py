"""Measurements, each a module that is run by itself."""
