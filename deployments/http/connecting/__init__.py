"""The connections of clients, before there is a request."""
