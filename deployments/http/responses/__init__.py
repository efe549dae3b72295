"""The responses API over chat completions, without stored state."""
