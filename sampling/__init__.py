"""What both tiers do alike when they sample: seeds, and tokens that one engine carries over to another."""
