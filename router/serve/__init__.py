"""The router as a Serve deployment."""
