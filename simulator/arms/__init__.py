"""What is compared: our schedulers and others'."""
