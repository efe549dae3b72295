"""What a decode replica does when its memory or its pace runs short, as pure rules."""
