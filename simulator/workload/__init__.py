"""What arrives."""
