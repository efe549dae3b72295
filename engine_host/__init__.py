"""The process of a replica around its engine: how that starts, on which cores, and that it lives."""
