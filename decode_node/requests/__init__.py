"""Requests that are under way on a decode replica, their attempts, and where they are prefilled again."""
