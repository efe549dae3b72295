"""What both tiers do alike when they sample: seeds, carried tokens, requests that are kept apart."""
