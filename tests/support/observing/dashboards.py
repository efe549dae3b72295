"""Queries of the dashboards as Grafana would send them."""

import re

VARIABLES = {"__rate_interval": "1m", "model": ".*", "tier": ".*", "replica": ".*"}


def filled(expr):
    """An expression with everything chosen in its variables."""
    return re.sub(r"\$(\w+)", lambda found: VARIABLES[found[1]], expr)
