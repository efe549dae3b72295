"""Files that people write and tools read: strict YAML and measured profiles."""
