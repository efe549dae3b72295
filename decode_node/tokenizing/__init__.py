"""The threads of a decode replica in which text is made tokens of, and tokens text."""
