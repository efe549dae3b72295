"""Placement: which replica prefills and which decodes a request, or why it is refused."""
