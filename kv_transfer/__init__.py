"""Moving KV cache from prefill to decode: the connector, its leases, and what it transferred."""
