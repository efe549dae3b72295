"""KV blocks of a decode engine in host memory: who has which, and how they get there and back."""
