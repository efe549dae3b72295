"""The error of a configuration."""


class ConfigError(Exception):
    """A configuration that cannot be used; the message names the key and what would be right."""
