"""What benchmarks and tests start: servers and engines of this machine, tiny models, a receiver of spans."""
