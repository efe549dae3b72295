"""Where a request of each model goes: what the ingress asks the router, and by which prefix."""
