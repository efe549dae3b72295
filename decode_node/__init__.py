"""The decode tier: takes a request from prefill to its last token."""
