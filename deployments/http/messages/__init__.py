"""Anthropic's messages API over chat completions."""
