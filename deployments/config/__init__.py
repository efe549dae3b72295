"""The configuration of a deployment, parsed once."""


class ConfigError(Exception):
    """A configuration that cannot be used; the message names the key and what would be right."""
