"""An HTTP client with one keep-alive connection."""

import http.client
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.message import Message
from types import TracebackType
from typing import Any, Self

HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response."""

    status: int
    reason: str
    headers: Message
    body: bytes

    @property
    def header_length(self) -> int | None:
        """The bytes of the JSON part, None where the response does not say."""
        value = self.headers[HEADER_LENGTH]
        return None if value is None else int(value)

    @property
    def fields(self) -> Any:
        """The JSON part."""
        return json.loads(self.body[: self.header_length])

    @property
    def error(self) -> str:
        """The message of an error in the protocol's form."""
        fields = self.fields
        assert list(fields) == ["error"], self.body[:1000]
        assert isinstance(fields["error"], str)
        return fields["error"]


class Client:
    """One connection to a server; a context manager. It connects anew where it was closed."""

    def __init__(self, host: str, port: int, timeout: float = 60) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    @property
    def local_port(self) -> int | None:
        """The port at this end, None where there is no connection: it tells connections apart."""
        sock = self._connection.sock
        return None if sock is None else int(sock.getsockname()[1])

    def send(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Send a request and read the whole response; an iterable body goes out chunked."""
        try:
            self._connection.request(method, path, body, dict(headers or {}))
            response = self._connection.getresponse()
            return Response(response.status, response.reason, response.headers, response.read())
        except (OSError, http.client.HTTPException):
            # Else the next request would fail too, whatever this one was.
            self._connection.close()
            raise

    def get(self, path: str) -> Response:
        """GET."""
        return self.send("GET", path)

    def infer(
        self, model: str, body: bytes | Iterable[bytes], headers: Mapping[str, str] | None = None
    ) -> Response:
        """POST to a model's infer endpoint; ``model`` may be NAME/versions/VERSION."""
        return self.send("POST", f"/v2/models/{model}/infer", body, headers)


def check_same(
    response: Response,
    like: Response,
    names: Iterable[str] = ("Content-Type", "Content-Length", HEADER_LENGTH),
) -> None:
    """Check that two responses are the same, with these headers."""
    assert (response.status, response.reason, response.body) == (
        like.status,
        like.reason,
        like.body,
    )
    for name in names:
        assert response.headers[name] == like.headers[name]
