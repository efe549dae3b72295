"""How many replicas a tier of replicas shall have."""
