"""Comparisons by name, their goodput, and the simulator held against a real server."""
