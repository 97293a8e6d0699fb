"""The table of errors: kind → HTTP status, gRPC code, retries; and what servers say of theirs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeVar

import orjson

_E = TypeVar("_E", bound=BaseException)

MAX_ERROR_START: Final = 4096
"""Bytes of an error's body that are read for its message."""

# V2 and V1 say "error", Python's frameworks "detail", OpenAI's API "message" within "error"; the
# entries of a list in FastAPI's "detail" say "msg".
_KEYS: Final = ("error", "detail", "message", "msg")
_MEMBER = re.compile(rb'"(?:error|detail|message|msg)"\s*:\s*"((?:[^"\\]|\\.)*)', re.DOTALL)
_TAG = re.compile(rb"<[^>]*>")


@dataclass(frozen=True, slots=True)
class ErrorTraits:
    """How the gateway responds to a kind of error, and what it means for retries."""

    status: int
    grpc_code: int
    retryable: bool = False
    """The server cannot have seen a complete request, so another endpoint may be tried."""
    upstream_failed: bool = False
    """The server failed, not the gateway or the client."""
    no_response: bool = False
    """The server closed without a byte of response; it may have processed the request."""


class ErrorKind(Enum):
    """What went wrong; gRPC codes are those of google.rpc.Code."""

    BAD_REQUEST = ErrorTraits(400, 3)
    UNAUTHENTICATED = ErrorTraits(401, 16)
    FORBIDDEN = ErrorTraits(403, 7)
    NOT_FOUND = ErrorTraits(404, 5)
    NOT_ALLOWED = ErrorTraits(405, 12)
    NOT_ACCEPTABLE = ErrorTraits(406, 9)
    CLIENT_TIMEOUT = ErrorTraits(408, 4)
    TOO_LARGE = ErrorTraits(413, 8)
    UNSUPPORTED_ENCODING = ErrorTraits(415, 12)
    HEAD_TOO_LARGE = ErrorTraits(431, 8)
    INTERNAL = ErrorTraits(500, 13)
    UNSUPPORTED = ErrorTraits(501, 12)
    BAD_RESPONSE = ErrorTraits(502, 14, upstream_failed=True)
    NOT_ONE_MESSAGE = ErrorTraits(502, 13, upstream_failed=True)
    NO_RESPONSE = ErrorTraits(502, 14, upstream_failed=True, no_response=True)
    OVERLOADED = ErrorTraits(503, 8)
    EXHAUSTED = ErrorTraits(503, 8, retryable=True)
    NOT_READY = ErrorTraits(503, 14)
    REFUSED = ErrorTraits(503, 14, retryable=True)
    UNREACHABLE = ErrorTraits(503, 14, retryable=True, upstream_failed=True)
    DEADLINE = ErrorTraits(504, 4)
    SERVER_TIMEOUT = ErrorTraits(504, 4, upstream_failed=True)
    LOOP = ErrorTraits(508, 9)


MAX_QUOTED_ERROR = 300
"""Characters of a server's own message that are quoted."""

RETRY_AFTER = 1
"""Seconds of Retry-After if the gateway itself is out of resources."""


INTERNAL_ERROR_TEXT = "the gateway failed; its log says why"
"""What clients and operators are told of an exception that nothing expected."""


class Audience(Enum):
    """Who is told of servers: operators learn their addresses, clients the names of upstreams."""

    OPERATORS = "operators"
    CLIENTS = "clients"


@dataclass(frozen=True, slots=True)
class ServerName:
    """The names of a server in errors: ``url`` for operators, ``public`` for clients.

    The public one is that of the upstream, or the URL if the settings expose it.
    """

    url: str
    public: str

    def name_for(self, audience: Audience) -> str:
        """Return the name for an audience."""
        return self.url if audience is Audience.OPERATORS else self.public


def upstream_name(upstream: str) -> str:
    """Return how errors name an upstream."""
    return f"upstream '{upstream}'"


class GatewayError(Exception):
    """An error that the client gets as ``{"error": public_message}``.

    ``message`` is for operators: the logs and the admin address. It may name the address of
    ``server``; in the public message the server's public name stands instead. A message that names
    several servers comes with its ``public_message``. ``retry_after`` is in seconds; None if a
    retry makes no sense. ``cause`` is the same for all errors of one cause, whose messages may
    differ by numbers; the default is the message.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        retry_after: int | None = None,
        server: ServerName | None = None,
        public_message: str | None = None,
        cause: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.cause = message if cause is None else cause
        self.retry_after = retry_after
        public = message if public_message is None else public_message
        if server is not None:
            public = public.replace(server.url, server.public)
        self.public_message = public

    def message_for(self, audience: Audience) -> str:
        """Return the message for an audience."""
        return self.message if audience is Audience.OPERATORS else self.public_message


def copy_error(error: GatewayError) -> GatewayError:
    """Copy an error for one of several calls, each of which adds its traceback."""
    return GatewayError(
        error.kind, error.message, error.retry_after, public_message=error.public_message
    )


def strip_tracebacks(error: _E) -> _E:
    """Drop the tracebacks of an exception and of its causes.

    Use it when an exception is caught and not raised again, or is stored. A traceback refers to
    frames, and these to local variables: a body, and often the exception. Such a cycle keeps the
    body until the garbage collector runs.
    """
    chain: list[BaseException | None] = [error]
    while chain:
        each = chain.pop()
        if each is not None:
            chain += (each.__cause__, each.__context__)
            each.__traceback__ = each.__cause__ = each.__context__ = None
    return error


def shorten(text: str, most: int) -> str:
    """Cut a quoted text to a number of characters and three dots."""
    return text if len(text) <= most else text[:most] + "..."


def replace_surrogates(text: str) -> str:
    """Return a text that UTF-8 can encode: what a peer or the system sent need not have been."""
    return text.encode(errors="replace").decode()


def escape_for_log(message: str) -> str:
    """Escape line breaks and control characters of a message for the log.

    Messages quote servers, and a server must not be able to write log lines.
    """
    if message.isprintable():
        return message
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in message)


def describe_error(status: object, message: str, most: int = MAX_QUOTED_ERROR) -> str:
    """Describe an error that a server returned, by its status and its message.

    The message becomes one line without control characters, of ``most`` characters at most.
    """
    words = " ".join(message[: 2 * MAX_QUOTED_ERROR + most].split())
    text = shorten(escape_for_log(replace_surrogates(words[: most + 1])), most)
    return f"{status}: {text}" if text else str(status)


def read_server_error(body: bytes) -> str:
    """Find the message in the start of the body of a server's error; empty if it is no text.

    It is a member of a JSON object as servers write it, or else the text itself. ``describe_error``
    makes it fit to be shown.
    """
    text = body[:MAX_ERROR_START].strip()
    if b"\0" in text:
        return ""
    if text.startswith(b"<"):
        text = _TAG.sub(b" ", text).strip()
    message = _find_message(text) if text.startswith(b"{") else None
    return text.decode(errors="replace") if message is None else message


def _find_message(text: bytes) -> str | None:
    try:
        value: Any = orjson.loads(text)
    except orjson.JSONDecodeError:  # perhaps only because it is cut
        found = _MEMBER.search(text)
        return None if found is None else _unescape(found[1].decode(errors="replace"))
    while not isinstance(value, str):
        if isinstance(value, list):
            value = value[0] if value else None
        elif isinstance(value, dict):
            value = next((value[key] for key in _KEYS if value.get(key)), None)
        else:
            return None
    return value


def _unescape(text: str) -> str:
    try:
        return str(orjson.loads(f'"{text}"'))
    except orjson.JSONDecodeError:
        return text


def bad_request(message: str) -> GatewayError:
    """Make the error of an invalid request; the message names the invalid element."""
    return GatewayError(ErrorKind.BAD_REQUEST, message)


class ModelMismatchError(GatewayError):
    """The error of a request that is well-formed, but not for its model or datatype.

    If the gateway knows these from the model's metadata, the metadata may be outdated.
    """

    def __init__(self, message: str) -> None:
        super().__init__(ErrorKind.BAD_REQUEST, message)


def bad_response(message: str, server: ServerName | None = None) -> GatewayError:
    """Make the error of a server's response that is invalid or was cut short.

    ``server`` is the one whose URL the message names.
    """
    return GatewayError(ErrorKind.BAD_RESPONSE, message, server=server)


def name_server(server: ServerName, error: GatewayError) -> GatewayError:
    """Add the server to the error of an invalid response: codecs do not know it."""
    if error.kind is ErrorKind.BAD_RESPONSE and server.url not in error.message:
        return bad_response(f"{server.url}: {error.message}", server)
    return error


@contextmanager
def name_server_in_errors(server: ServerName) -> Iterator[None]:
    """Add the server to errors raised inside; see ``name_server``."""
    try:
        yield
    except GatewayError as error:
        named = name_server(server, error)
        if named is error:
            raise
        raise named from error
