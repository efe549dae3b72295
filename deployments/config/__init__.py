"""The configuration of a deployment, parsed once."""
