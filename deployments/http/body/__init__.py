"""What a request body says: how it is read, which of its fields are served, and how much one may ask for."""
