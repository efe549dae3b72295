"""Where a request of each model goes: what the router is asked, and what follows from its answer."""
