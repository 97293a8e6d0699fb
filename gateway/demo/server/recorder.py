"""A record of what the server was last asked and answered, so that it can be shown."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from gateway.demo.server.api import Call
from gateway.demo.server.wire import HEADER_LENGTH, Answer, stated_header_length

KEPT_TEXT: Final = 4096  # bytes of the JSON part that are kept
KEPT_PATHS: Final = 64

_KEPT_HEADERS: Final = ("Content-Type", "Content-Length", "Content-Encoding", HEADER_LENGTH)
_SHOWN: Final = ("/infer", "/trace", "/trace/setting")


@dataclass(frozen=True, slots=True)
class Message:
    """Hold one direction of an exchange.

    `header_length` is what the HTTP header says, None if that is no number. `text` is the JSON
    part, its first `KEPT_TEXT` bytes. `size` is that of the whole body in bytes.
    """

    headers: Mapping[str, str]
    header_length: int | None
    text: str
    size: int

    @classmethod
    def of(cls, headers: Mapping[str, str], body: bytes) -> Self:
        """Note what is worth keeping of a request or answer."""
        header_length = stated_header_length(headers)
        json_part = body if header_length is None else body[:header_length]
        return cls(
            headers={name: headers[name] for name in _KEPT_HEADERS if name in headers},
            header_length=header_length,
            text=json_part[:KEPT_TEXT].decode(errors="replace"),
            size=len(body),
        )

    @property
    def form(self) -> str:
        """Name the form: empty, JSON, raw binary or binary (with any JSON tensors beside)."""
        if self.header_length is None:
            return "JSON" if self.size else "empty"
        return "binary" if self.header_length else "raw binary"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Hold what came in and went out; `seconds` is the work between, without any transfer."""

    method: str
    path: str
    request: Message
    status: int
    answer: Message
    seconds: float


class Recorder:
    """Keep the last exchange of each path, for the `KEPT_PATHS` last used paths."""

    def __init__(self) -> None:
        self.last: Exchange | None = None  # of inference and trace, leaving out all look-ups
        self._by_path: OrderedDict[str, Exchange] = OrderedDict()

    def add(self, call: Call, answer: Answer, seconds: float) -> None:
        """Record an exchange."""
        exchange = Exchange(
            call.method,
            call.path,
            Message.of(call.headers, call.body),
            answer.status,
            Message.of(answer.headers, answer.body),
            seconds,
        )
        self._by_path[call.path] = exchange
        self._by_path.move_to_end(call.path)
        if len(self._by_path) > KEPT_PATHS:
            self._by_path.popitem(last=False)
        if call.path.endswith(_SHOWN):
            self.last = exchange

    def at(self, path: str) -> Exchange | None:
        """Return the last exchange of a path."""
        return self._by_path.get(path)
