"""The OpenAI-compatible HTTP API: what every request passes on its way in and out."""
