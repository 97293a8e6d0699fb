"""Refuses responses to requests that infer which hold no tensors, or not all of them.

What passes untouched is not parsed as a whole. Its start, its end and its size are looked at, and
the inference header of a binary response. Converted responses are checked as they are converted.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Final, NamedTuple

from multidict import CIMultiDictProxy

from gateway.codec.json.text_search import contains
from gateway.codec.v2.response_reader import read_without_data
from gateway.errors import ErrorKind, GatewayError, bad_response, shorten
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.operations import OperationKind
from gateway.protocol.request_header import HEADER_LENGTH, check_entries
from gateway.protocol.response_header import (
    is_success,
    parse_response_header,
    read_outputs,
    response_header_length,
)
from gateway.sizes import CONVERT_CHUNK, MAX_CACHED_DOCUMENT, QUOTED_NAME, QUOTED_TEXT

_PAGE_TYPE: Final = re.compile(
    r"\s*(?:text/(?:html|xml)|application/(?:xhtml\+)?xml)(?![\w.+-])", re.IGNORECASE
)
"""The content types of pages: HTML, XHTML, XML."""
_EVENTS_TYPE: Final = re.compile(r"\s*text/event-stream\b", re.IGNORECASE)
_JSON_TYPE: Final = re.compile(r"\s*application/(?:[^;,]*\+)?json\b", re.IGNORECASE)
_TEXT_TYPE: Final = re.compile(rf"\s*(?:\Z|text/)|{_JSON_TYPE.pattern}", re.IGNORECASE)
"""The content types that a page may be sent with: none, any text, JSON."""
_JSON_OBJECT: Final = re.compile(rb"[ \t\r\n]*(?:\{|\Z)")
_NO_PAGE: Final = re.compile(
    rb"(?!(?:\xef\xbb\xbf)?[ \t\r\n]*<(?:!doctype|html|head|body|\?xml)\b)", re.IGNORECASE
)
"""What bodies may start with; of space alone, nothing is known yet."""
_ENDS: Final = {b"{": b"}", b"[": b"]"}
"""How JSON ends, by how it starts."""
_ID: Final = re.compile(rb'"id"[ \t\r\n]*:[ \t\r\n]*"[^"\\]*"')
"""An id: no string could hold the quotes of its key, so it is none of a string's text."""
_OUTPUTS: Final = b'"outputs"'
_START: Final = 1024
"""Bytes that tell what a body is; the key of the outputs mostly is in them."""


class NoTensorsError(GatewayError):
    """A response of status 2xx, to a request that infers, holds no tensors: 502.

    ``start`` is the start of its body, None if that is not known.
    """

    def __init__(self, status: int, content_type: str, start: bytes | None = None) -> None:
        kind = f"the Content-Type {shorten(content_type, QUOTED_NAME)!r}"
        text = (
            f"the server's response of status {status} holds no tensors; it has "
            f"{kind if content_type else 'no Content-Type'}"
        )
        if start is not None and b"\0" not in start:  # else it is no text
            words = " ".join(start[: 4 * QUOTED_TEXT].decode(errors="replace").split())
            begin = f"begins with {shorten(words, QUOTED_TEXT)!r}"
            text += f" and {begin if words else 'an empty body'}"
        super().__init__(ErrorKind.BAD_RESPONSE, text)
        self._head = status, content_type

    def quoting(self, start: bytes) -> NoTensorsError:
        """Return the error with the start of the body, which is then known."""
        return NoTensorsError(*self._head, start)


class BodyEnd(NamedTuple):
    """What the start of a body says of its end; ``check`` raises GatewayError (502)."""

    last: bytes = b""
    """The byte that it ends with, but for white space; empty if that may be any."""
    header_size: int = 0
    """Bytes of the JSON before binary tensors."""
    size: int | None = None
    """Bytes of the JSON and of the tensors; None if that is not known."""

    def check(self, size: int, last: bytes) -> None:
        """Check a complete body by its size, and the last byte that is no white space."""
        if self.last and last != self.last:
            # A body without a length ends where the server's connection does, and clients would get
            # it with one.
            raise bad_response(
                "the server's response is JSON that breaks off, or that binary tensors follow"
                f" without {HEADER_LENGTH}"
            )
        if size < self.header_size:
            raise bad_response(
                f"the server's response has {HEADER_LENGTH}: {self.header_size}, but {size} bytes"
            )
        if self.size is not None and size < self.size:
            raise bad_response(f"{RESPONSE.name} ends before all that its header says has come")
        if self.size is not None and size > self.size:
            raise bad_response(f"{RESPONSE.name} holds more bytes than its header says")


_OBJECT_END: Final = BodyEnd(b"}")


class TensorCheck:
    """Refuses bodies that hold no tensors: pages, empty ones, JSON without outputs or its end."""

    start_size: int = 1
    """Bytes of the start of a body that ``check_start`` needs, if it has so many."""

    def __init__(self, status: int, content_type: str, starts: re.Pattern[bytes]) -> None:
        self._head: Final = status, content_type
        self._starts: Final = starts
        self._is_json: Final = _JSON_TYPE.match(content_type) is not None

    def check_start(self, start: bytes | memoryview, size: int | None) -> BodyEnd:
        """Check the start of a body, empty if it has none, and its size if that is known.

        Returns what must hold at its end. Raises NoTensorsError, and GatewayError (502) as that.
        """
        begin = bytes(start[:_START])
        if not begin or not self._starts.match(begin):
            raise NoTensorsError(*self._head, begin)
        if self._starts is _JSON_OBJECT:
            return _OBJECT_END
        # What models make of V1, and generate, need be no JSON.
        return BodyEnd(_ENDS.get(begin.lstrip()[:1], b"") if self._is_json else b"")

    def check_whole(self, body: bytes | memoryview) -> None:
        """Check a complete body, all of it up to a chunk; raises GatewayError (502)."""
        if bytes(body[:1]).isspace() and bytes(body).isspace():
            raise NoTensorsError(*self._head, bytes(body[:_START]))
        self.check_start(body, len(body)).check(len(body), last_byte(body))
        if self._starts is not _JSON_OBJECT or len(body) > CONVERT_CHUNK:
            return
        if contains(bytes(body[:_START]), _OUTPUTS):
            return
        text = bytes(body)
        # Escapes could hide the key.
        if not contains(text, _OUTPUTS) and not contains(text, b"\\u"):
            raise NoTensorsError(*self._head, text[:_START])


class BinaryCheck(TensorCheck):
    """Refuses binary responses whose JSON is none, or has another size, or other tensors behind it.

    ``header_size`` is the size of the JSON. Above 16 KiB, only its start and the sizes are checked.
    """

    def __init__(self, status: int, content_type: str, header_size: int) -> None:
        super().__init__(status, content_type, _JSON_OBJECT)
        self._header_size: Final = header_size
        self.start_size = header_size if header_size <= MAX_CACHED_DOCUMENT else 1
        self._checked: tuple[bytes, int] | None = None
        """The last header that was checked, without its id, and the size of its body.

        Most have the same.
        """

    def check_start(self, start: bytes | memoryview, size: int | None) -> BodyEnd:
        """Check the JSON of a body; see TensorCheck."""
        header = bytes(start[: self.start_size])
        super().check_start(header, size)
        end = BodyEnd(header_size=self._header_size)
        if size is not None:
            end.check(size, b"")
        if len(header) == self._header_size:
            end = BodyEnd(b"", self._header_size, len(header) + _size_of_tensors(header))
            if size is not None:
                end.check(size, b"")
        return end

    def check_whole(self, body: bytes | memoryview) -> None:
        """Check a complete body; raises GatewayError (502)."""
        start = body[: self._header_size]
        header = start if isinstance(start, bytes) else bytes(start)
        checked = _ID.sub(b'"id":""', header, 1), len(body)
        if checked != self._checked:
            self.check_start(body, len(body))
            if self._header_size <= _START:
                self._checked = checked


def _size_of_tensors(header: bytes) -> int:
    """Return the bytes that must follow a header; raises GatewayError (502) for an invalid one."""
    with suppress(GatewayError):  # perhaps only the datatype is unknown
        if (response := read_without_data(header)) is not None:
            return sum(output.binary_size or 0 for output in response.head.outputs)
    fields = parse_response_header(header)
    if "outputs" not in fields:
        raise bad_response("the server's response has no outputs")
    for entry in check_entries(fields, RESPONSE):
        datatype = entry.get("datatype") if isinstance(entry, dict) else None
        if isinstance(datatype, str) and datatype not in DATATYPES:
            entry["datatype"] = "BYTES"  # it is for the client to know; its size may be any
    return sum(output.binary_size or 0 for output in read_outputs(fields))


def last_byte(text: bytes | memoryview) -> bytes:
    """Return the last byte that is no white space; empty if there is none."""
    end = bytes(text[-_START:]).rstrip() or bytes(text).rstrip()
    return end[-1:]


def tensor_check(
    status: int, headers: CIMultiDictProxy[str], kind: OperationKind
) -> TensorCheck | None:
    """Return the check for the body of a response to a request that infers.

    None if any body passes: that of a redirect, an error, or a response whose head promises events,
    compressed text, or bytes of V1. Raises NoTensorsError if the head says that there are no
    tensors: login pages, and ingresses that lead elsewhere, respond so. Raises GatewayError (502)
    for an invalid size of the JSON before binary tensors.
    """
    if not is_success(status):
        return None
    content_type = headers.get("Content-Type", "")
    if status in (204, 205):
        raise NoTensorsError(status, content_type, b"")
    header_size = response_header_length(headers, None) if kind is OperationKind.INFER else None
    # Servers differ in Content-Type, and some send none: it refuses pages alone.
    if header_size is None and _PAGE_TYPE.match(content_type):
        raise NoTensorsError(status, content_type)
    if "Content-Encoding" in headers:
        return None
    if header_size is not None:
        return BinaryCheck(status, content_type, header_size)
    if kind is OperationKind.INFER:
        return TensorCheck(status, content_type, _JSON_OBJECT)
    # The head of a stream of events goes out at once, and of events there may be none.
    if _EVENTS_TYPE.match(content_type):
        return None
    # What KServe's models make of V1 need be no JSON.
    if kind is not OperationKind.GENERATE and not _TEXT_TYPE.match(content_type):
        return None
    return TensorCheck(status, content_type, _NO_PAGE)
