"""Cuts bodies into messages: "Length-Prefixed-Message" of PROTOCOL-HTTP2.md, section "Requests".

A message is preceded by a byte that tells whether it is compressed, and by its length in 4 bytes,
big-endian. Frames of HTTP/2 end anywhere in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Final

from gateway.errors import GatewayError
from gateway.protocol.error_vocabulary import ErrorVocabulary
from gateway.protocol.grpc.wire import Buffer

PREFIX_SIZE: Final = 5
_PREFIX: Final = Struct(">BI")


class MessagePiece:
    """A part of a message; ``size`` and ``is_compressed`` are those of the whole message.

    The first piece (``begins``) may be empty: the size is known before any data.
    """

    def __init__(
        self, data: memoryview, size: int, is_compressed: bool, begins: bool, ends: bool
    ) -> None:
        self.data: Final = data
        self.size: Final = size
        self.is_compressed: Final = is_compressed
        self.begins: Final = begins
        self.ends: Final = ends


class MessageReader:
    """Finds the messages in a body that arrives in pieces; it buffers no data.

    ``cap`` limits the bytes of a message, ``cap_name`` is the setting that says so, ``words``
    tells whose body it is.
    """

    def __init__(self, cap: int, cap_name: str, words: ErrorVocabulary) -> None:
        self.messages = 0
        """Messages that have begun."""
        self.cap = cap
        self._cap_name: Final = cap_name
        self._words: Final = words
        self._prefix = b""
        self._size = 0
        self._is_compressed = False
        self._remaining = 0

    def feed(self, piece: Buffer) -> Iterator[MessagePiece]:
        """Yield the parts of messages in a piece of the body, as views; iterate to the end.

        Raises GatewayError for a flag other than 0 and 1 (400, 502), and for a message above the
        cap (413, 502).
        """
        view = memoryview(piece)
        position = 0
        while position < len(view):
            begins = not self._remaining
            if begins:
                start = position
                position += PREFIX_SIZE - len(self._prefix)
                self._prefix += view[start:position]
                if len(self._prefix) < PREFIX_SIZE:
                    return
                self._begin()
            data = view[position : position + self._remaining]
            position += len(data)
            self._remaining -= len(data)
            yield MessagePiece(data, self._size, self._is_compressed, begins, not self._remaining)

    def end(self) -> None:
        """Check that the body ends after a message; raises GatewayError (400, 502)."""
        if self._prefix:
            raise self._error(f"ends within the {PREFIX_SIZE} bytes before a gRPC message")
        if self._remaining:
            received = self._size - self._remaining
            raise self._error(f"ends after {received} of {self._size} bytes of a gRPC message")

    def _begin(self) -> None:
        flag, size = _PREFIX.unpack(self._prefix)
        self._prefix = b""
        if flag > 1:
            raise self._error(
                f"has the flag {flag} before a gRPC message; it is 0, or 1 for a compressed message"
            )
        self.check_size(size)
        self.messages += 1
        self._size = self._remaining = size
        self._is_compressed = bool(flag)

    def check_size(self, size: int) -> None:
        """Raise GatewayError (413, 502) for the size of a message above the cap."""
        if size > self.cap:
            raise GatewayError(
                self._words.too_large,
                f"{self._words.name} has a gRPC message of {size} bytes, which is larger than "
                f"{self.cap} bytes ({self._cap_name})",
            )

    def _error(self, text: str) -> GatewayError:
        return self._words.malformed(f"{self._words.name} {text}")


def first_message_size(start: bytes | memoryview) -> int:
    """Return the bytes of the message that a body begins with, and its prefix; 0 without that."""
    if len(start) < PREFIX_SIZE:
        return 0
    return PREFIX_SIZE + int.from_bytes(start[1:PREFIX_SIZE], "big")


def is_one_message(start: bytes | memoryview, size: int) -> bool:
    """Tell whether a body of ``size`` bytes that begins with ``start`` is one complete message."""
    if len(start) < PREFIX_SIZE:
        return False
    flag, message_size = _PREFIX.unpack(start[:PREFIX_SIZE])
    return flag <= 1 and bool(size == PREFIX_SIZE + message_size)


def frame(payload_size: int, is_compressed: bool = False) -> bytes:
    """Return the bytes before a message of ``payload_size`` bytes, below 4 GiB."""
    return _PREFIX.pack(is_compressed, payload_size)
