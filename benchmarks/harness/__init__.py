"""What benchmarks share with each other and with the tests: servers, engines, tiny models, load, measures."""
