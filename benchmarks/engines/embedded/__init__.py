"""Benchmarks of the embedded model, served as `make serve` does."""
