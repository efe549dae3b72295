"""Benchmarks of when a step is stopped: the rules, their cost, and how long a stop may wait."""
