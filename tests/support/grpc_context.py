"""What Serve hands to a gRPC method."""


class Context:
    """Of a call: what has been set last counts, but for Serve's own id."""

    def __init__(self):
        self.code, self.details, self.trailers = None, None, [("request_id", "r")]

    def invocation_metadata(self):
        return [("authorization", "Bearer k")]

    def set_code(self, code):
        self.code = code

    def set_details(self, details):
        self.details = details

    def trailing_metadata(self):
        return self.trailers

    def set_trailing_metadata(self, trailers):
        self.trailers = [("request_id", "r"), *trailers]
