"""Cuts bodies into messages: "Length-Prefixed-Message" of PROTOCOL-HTTP2.md, section "Requests".

A message is preceded by a byte that tells whether it is compressed, and by its length in 4 bytes,
big-endian. Frames of HTTP/2 end anywhere in it.
"""

from __future__ import annotations

from typing import Final

from gateway.errors import GatewayError
from gateway.protocol.error_vocabulary import ErrorVocabulary
from gateway.protocol.grpc.wire import Buffer

PREFIX_SIZE: Final = 5

_MAX_COPY: Final = 16 * 1024
"""Data of at most so many bytes are copied, if they come in bytes: that costs less than a view."""


class MessagePiece:
    """A part of a message; ``size`` and ``is_compressed`` are those of the whole message.

    The first piece (``begins``) may be empty: the size is known before any data.
    """

    def __init__(
        self, data: Buffer, size: int, is_compressed: bool, begins: bool, ends: bool
    ) -> None:
        self.data: Final = data
        self.size: Final = size
        self.is_compressed: Final = is_compressed
        self.begins: Final = begins
        self.ends: Final = ends


class MessageReader:
    """Finds the messages in a body that arrives in pieces; it buffers no data.

    Feed it a piece of the body, then take the pieces of messages in it until there is none.
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
        self._piece: Buffer = b""
        self._position = self._end = 0

    def feed(self, piece: Buffer) -> None:
        """Add the next piece of the body."""
        self._piece = piece
        self._position, self._end = 0, len(piece)

    def next_piece(self) -> MessagePiece | None:
        """Return the next part of a message, None if there is none in the piece of the body.

        Raises GatewayError for a flag other than 0 and 1 (400, 502), and for a message above the
        cap (413, 502).
        """
        begins = not self._remaining
        if not self._has_more():
            return None
        data = self._take(self._remaining)
        self._remaining -= len(data)
        return MessagePiece(data, self._size, self._is_compressed, begins, not self._remaining)

    def count_ended(self, piece: Buffer) -> int:
        """Pass over the next piece of the body; return how many messages end in it.

        Raises GatewayError as ``next_piece``.
        """
        ended = 0
        self.feed(piece)
        while self._has_more():
            size = min(self._remaining, self._end - self._position)
            self._position += size
            self._remaining -= size
            ended += not self._remaining
        return ended

    def _has_more(self) -> bool:
        """Return whether there is a part of a message, which may have begun just now."""
        if self._position == self._end or not (self._remaining or self._read_prefix()):
            self._piece = b""  # a view would pin its slab
            return False
        return True

    def _take(self, size: int) -> Buffer:
        """Return the next bytes, at most so many."""
        piece, start = self._piece, self._position
        end = self._position = min(self._end, start + size)
        if isinstance(piece, bytes) and end - start <= _MAX_COPY:
            return piece[start:end]
        return memoryview(piece)[start:end]

    def _read_prefix(self) -> bool:
        """Read what precedes a message; return whether all of it is there."""
        taken = self._take(PREFIX_SIZE - len(self._prefix))
        prefix = taken if isinstance(taken, bytes) else bytes(taken)
        if self._prefix:
            prefix = self._prefix + prefix
        is_complete = len(prefix) == PREFIX_SIZE
        if is_complete:
            self._begin(prefix)
        self._prefix = b"" if is_complete else prefix
        return is_complete

    def end(self) -> None:
        """Check that the body ends after a message; raises GatewayError (400, 502)."""
        if self._prefix:
            raise self._error(f"ends within the {PREFIX_SIZE} bytes before a gRPC message")
        if self._remaining:
            received = self._size - self._remaining
            raise self._error(f"ends after {received} of {self._size} bytes of a gRPC message")

    def _begin(self, prefix: bytes) -> None:
        flag, size = prefix[0], message_size(prefix)
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
    return PREFIX_SIZE + message_size(bytes(start[:PREFIX_SIZE]))


def is_one_message(start: bytes | memoryview, size: int) -> bool:
    """Tell whether a body of ``size`` bytes that begins with ``start`` is one complete message."""
    if len(start) < PREFIX_SIZE:
        return False
    prefix = bytes(start[:PREFIX_SIZE])
    return prefix[0] <= 1 and size == PREFIX_SIZE + message_size(prefix)


def message_size(prefix: bytes) -> int:
    """Return the bytes of the message that follows these ``PREFIX_SIZE`` bytes."""
    high = prefix[1] << 8 | prefix[2]
    return high << 16 | prefix[3] << 8 | prefix[4]


def frame(payload_size: int, is_compressed: bool = False) -> bytes:
    """Return the bytes before a message of ``payload_size`` bytes, below 4 GiB."""
    return (is_compressed << 32 | payload_size).to_bytes(PREFIX_SIZE, "big")
