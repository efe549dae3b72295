"""Requests that are under way on a decode replica, and where they are prefilled again."""
