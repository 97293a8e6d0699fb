"""What is captured of a call for operators: the messages between the gateway and its servers."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping
from typing import Any

from gateway.errors import replace_surrogates

_MAX_BODY = 64 * 1024
"""Bytes of a body that are kept: its begin."""
_MAX_ATTEMPTS = 8
"""Attempts that are kept: the first ones."""
_JSON_SIZE = "inference-header-content-length"
_SIZE = re.compile("[0-9]{1,18}")


class CapturedMessage:
    """A request or a response: its first line, its headers, and the begin of its body."""

    def __init__(self, start: str, headers: Iterable[tuple[str, str]], max_body: int) -> None:
        self.start = start
        self.headers = list(headers)
        self.trailers: list[tuple[str, str]] = []
        self.size = 0
        """The bytes of the body."""
        self._max_body = max_body
        self._body = bytearray()

    @classmethod
    def of_request(
        cls,
        method: str,
        target: str,
        headers: Mapping[str, str],
        *,
        is_grpc: bool,
        max_body: int = _MAX_BODY,
    ) -> CapturedMessage:
        """Return a request without its body."""
        return cls(f"{method} {target} {_version(is_grpc)}", headers.items(), max_body)

    @classmethod
    def of_response(
        cls, status: int, reason: str, headers: Mapping[str, str], *, is_grpc: bool
    ) -> CapturedMessage:
        """Return a response without its body."""
        return cls(f"{_version(is_grpc)} {status} {reason}".rstrip(), headers.items(), _MAX_BODY)

    def add(self, piece: bytes | memoryview) -> None:
        """Add a piece of the body."""
        self.size += len(piece)
        self._body += piece[: self._max_body - len(self._body)]

    def restart(self) -> None:
        """Forget the body, which is sent again from its start."""
        self.size = 0
        self._body.clear()

    def describe(self) -> dict[str, Any]:
        """Return the message as JSON, its body in base64."""
        return {
            "start": replace_surrogates(self.start),
            "headers": _as_text(self.headers),
            "trailers": _as_text(self.trailers),
            "size": self.size,
            "body": b64encode(self._body).decode(),
            "json_size": self._json_size(),
        }

    def _json_size(self) -> int | None:
        """Return the bytes of the JSON before tensors; None unless the body has as many."""
        for name, value in self.headers:
            if name.lower() == _JSON_SIZE and _SIZE.fullmatch(value):
                return int(value) if int(value) <= self.size else None
        return None


def _version(is_grpc: bool) -> str:
    return "HTTP/2" if is_grpc else "HTTP/1.1"


def _as_text(lines: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return headers that JSON can have: what servers send need not have been UTF-8."""
    return [(replace_surrogates(name), replace_surrogates(value)) for name, value in lines]


class CapturedAttempt:
    """A request as it was sent to an endpoint, and what came back."""

    def __init__(self, upstream: str, endpoint: str, request: CapturedMessage) -> None:
        self.upstream = upstream
        self.endpoint = endpoint
        self.request = request
        self.response: CapturedMessage | None = None
        self.error = ""
        """Why there is no whole response; empty if there is one."""

    def describe(self) -> dict[str, Any]:
        """Return the attempt as JSON."""
        return {
            "upstream": self.upstream,
            "endpoint": self.endpoint,
            "request": self.request.describe(),
            "response": None if self.response is None else self.response.describe(),
            "error": replace_surrogates(self.error) or None,
        }


class CallCapture:
    """Gathers the attempts of a call, which may skip conversion to show what that saves."""

    def __init__(self, skips_conversion: bool = False) -> None:
        self.skips_conversion = skips_conversion
        self._attempts: list[CapturedAttempt] = []

    def begin(self, upstream: str, endpoint: str, request: CapturedMessage) -> CapturedAttempt:
        """Return a new attempt."""
        attempt = CapturedAttempt(upstream, endpoint, request)
        if len(self._attempts) < _MAX_ATTEMPTS:
            self._attempts.append(attempt)
        return attempt

    def describe(self) -> list[dict[str, Any]]:
        """Return the attempts as JSON."""
        return [each.describe() for each in self._attempts]
