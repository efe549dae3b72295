"""What the replica process decides, pure."""
