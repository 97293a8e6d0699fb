"""The one exception of the demo server: it rejects a request."""


class RequestError(Exception):
    """A rejected request: the HTTP status, and the message for the `error` member."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
