"""The SLO monitor as a Ray actor, and its metrics."""
