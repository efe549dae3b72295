"""The workers of a decode replica."""
