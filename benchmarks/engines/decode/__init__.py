"""Decode engines short of memory or pace."""
