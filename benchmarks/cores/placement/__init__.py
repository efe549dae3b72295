"""Where requests run: what the router decides, and what moving them later could add."""
