"""Moving KV cache from prefill to decode: the connector that both tiers load."""
