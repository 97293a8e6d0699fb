"""Records the last calls to the server, for the show."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from gateway.demo.server.wire import (
    HEADER_LENGTH,
    HttpRequest,
    HttpResponse,
    stated_header_length,
)

MAX_TEXT: Final = 4096  # bytes of the JSON part that are recorded
MAX_PATHS: Final = 64

_RECORDED_HEADERS: Final = ("Content-Type", "Content-Length", "Content-Encoding", HEADER_LENGTH)
_TRACKED_ENDINGS: Final = ("/infer", "/trace", "/trace/setting")


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """A recorded request or response.

    `header_length` is the value of the HTTP header, None if it is not a number. `text` has the
    first `MAX_TEXT` bytes of the JSON part. `size` is that of the whole body in bytes.
    """

    headers: Mapping[str, str]
    header_length: int | None
    text: str
    size: int

    @classmethod
    def from_http(cls, headers: Mapping[str, str], body: bytes) -> Self:
        """Record the headers and the body of a request or response."""
        header_length = stated_header_length(headers)
        json_part = body if header_length is None else body[:header_length]
        return cls(
            headers={name: headers[name] for name in _RECORDED_HEADERS if name in headers},
            header_length=header_length,
            text=json_part[:MAX_TEXT].decode(errors="replace"),
            size=len(body),
        )

    @property
    def form(self) -> str:
        """Name the form: empty, JSON, raw binary, or binary (also if some tensors are JSON)."""
        if self.header_length is None:
            return "JSON" if self.size else "empty"
        return "binary" if self.header_length else "raw binary"


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A request with its response; `seconds` is the time in the API, without any transfer."""

    method: str
    path: str
    request: RecordedMessage
    status: int
    response: RecordedMessage
    seconds: float


class Recorder:
    """Records the last call to each path, for the `MAX_PATHS` paths used last.

    `last` is the last inference call, or call for trace settings.
    """

    def __init__(self) -> None:
        self.last: RecordedCall | None = None
        self._by_path: OrderedDict[str, RecordedCall] = OrderedDict()

    def add(self, request: HttpRequest, response: HttpResponse, seconds: float) -> None:
        """Record a call."""
        call = RecordedCall(
            request.method,
            request.path,
            RecordedMessage.from_http(request.headers, request.body),
            response.status,
            RecordedMessage.from_http(response.headers, response.body),
            seconds,
        )
        self._by_path[call.path] = call
        self._by_path.move_to_end(call.path)
        if len(self._by_path) > MAX_PATHS:
            self._by_path.popitem(last=False)
        if call.path.endswith(_TRACKED_ENDINGS):
            self.last = call

    def last_to(self, path: str) -> RecordedCall | None:
        """Return the last call to a path."""
        return self._by_path.get(path)
