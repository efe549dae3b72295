"""A decode engine that runs out of KV memory, block by block, and the ways of several servers to bear it."""
