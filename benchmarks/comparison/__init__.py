"""SlackServe against stock Ray Serve LLM."""
