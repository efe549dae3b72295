"""How long things take: prefills, KV transfers, first tokens; and how far such predictions are off."""
