"""The one error of the demo server: a request that it refuses."""


class RequestError(Exception):
    """Refuse a request with an HTTP status and a message for the `error` member of the answer."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
