"""What the cluster-wide monitor knows and decides."""
