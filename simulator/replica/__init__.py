"""One prefill replica in virtual time."""
