"""Which prefill replica takes a request."""
