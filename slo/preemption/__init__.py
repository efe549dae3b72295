"""Whether a running forward pass is preempted, and for whom."""
