"""What a client gets: the pieces that the decode tier generates as one response, whole or streamed."""
