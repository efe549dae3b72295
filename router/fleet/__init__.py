"""What the router knows of the replicas."""
