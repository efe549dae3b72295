"""What the scheduler decides, pure: which step runs next, and what is suspended."""
