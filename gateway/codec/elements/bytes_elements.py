"""Packs and splits BYTES elements: each is a little-endian uint32 length and that many bytes."""

from __future__ import annotations

import struct
from itertools import chain

_PREFIX = struct.Struct("<I")

PREFIX_SIZE = _PREFIX.size
"""Bytes of the length before each element."""

MAX_ELEMENT_SIZE = 2**32 - 1
"""The most bytes of an element that its length can express."""


class PartialElement:
    """Appends an element to a tensor's chunks while its bytes arrive."""

    def __init__(self, chunks: list[bytes]) -> None:
        self.size = 0
        self._chunks = chunks
        self._prefix_at = len(chunks)
        chunks.append(bytes(PREFIX_SIZE))

    def append(self, data: bytes) -> None:
        """Append the next bytes."""
        self._chunks.append(data)
        self.size += len(data)

    def end(self) -> None:
        """Fill in the length; raises ValueError if it exceeds ``MAX_ELEMENT_SIZE``."""
        if self.size > MAX_ELEMENT_SIZE:
            raise ValueError(self.size)
        self._chunks[self._prefix_at] = _PREFIX.pack(self.size)


def read_length(data: bytes) -> int:
    """Return the length that an element begins with."""
    (length,) = _PREFIX.unpack_from(data)
    return int(length)


def pack_elements(elements: list[bytes]) -> bytes:
    """Return elements in binary form."""
    lengths = map(_PREFIX.pack, map(len, elements))
    return b"".join(chain.from_iterable(zip(lengths, elements, strict=True)))


def pack_strings(strings: list[str]) -> bytes:
    """Return strings in binary form."""
    return pack_elements(list(map(str.encode, strings)))


def split_elements(data: bytes, position: int) -> tuple[list[bytes], int]:
    """Return the complete elements from ``position`` on, and where they end."""
    elements: list[bytes] = []
    append, length_at, width, size = elements.append, _PREFIX.unpack_from, _PREFIX.size, len(data)
    while (start := position + width) <= size:
        end = start + length_at(data, position)[0]
        if end > size:
            break
        append(data[start:end])
        position = end
    return elements, position
