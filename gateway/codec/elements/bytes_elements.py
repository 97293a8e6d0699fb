"""Packs and splits BYTES elements: each is a little-endian uint32 length and that many bytes."""

from __future__ import annotations

import struct
from itertools import chain

import numpy as np
import numpy.typing as npt

_PREFIX = struct.Struct("<I")

PREFIX_SIZE = _PREFIX.size
"""Bytes of the length before each element."""

MAX_ELEMENT_SIZE = 2**32 - 1
"""The most bytes of an element that its length can express."""

_MANY = 256
"""From this number of strings on, numpy packs short ones faster than Python."""
_SHORT = 16
"""Up to this average length in bytes, likewise."""

Codes = npt.NDArray[np.uint8]
Lengths = npt.NDArray[np.intp]


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
    if len(strings) < _MANY:
        return pack_elements(list(map(str.encode, strings)))
    joined = "".join(strings)
    texts = joined.encode()
    if len(texts) > len(strings) * _SHORT:
        return pack_elements(list(map(str.encode, strings)))
    each = strings if joined.isascii() else map(str.encode, strings)
    lengths = np.fromiter(map(len, each), np.intp, len(strings))
    return pack_texts(lengths, np.frombuffer(texts, np.uint8))


def find_short_lengths(data: bytes) -> tuple[Lengths, int] | None:
    """Return the lengths of the complete elements in binary form, and where they end.

    Returns None unless all are shorter than 256 bytes and contain no NUL. Then zeros occur in
    lengths only: four for an empty element, and three behind the first byte of others.
    """
    codes = np.frombuffer(data, np.uint8)
    edges = np.flatnonzero(np.diff(codes == 0, prepend=False, append=False))
    zeros, sizes = edges[::2], edges[1::2] - edges[::2]
    counts = np.where(sizes == PREFIX_SIZE - 1, 0, sizes // PREFIX_SIZE)
    empty = np.repeat(zeros - PREFIX_SIZE * (np.cumsum(counts) - counts), counts)
    empty += np.arange(0, PREFIX_SIZE * empty.size, PREFIX_SIZE)
    starts = np.sort(np.concatenate((zeros[sizes == PREFIX_SIZE - 1] - 1, empty)))
    lengths = codes[starts].astype(np.intp)
    ends = starts + PREFIX_SIZE + lengths
    if not starts.size or starts[0] or (starts[1:] != ends[:-1]).any():
        return None
    complete = int(np.searchsorted(ends, codes.size, side="right"))
    return (lengths[:complete], int(ends[complete - 1])) if complete else None


def mask_lengths(lengths: Lengths) -> npt.NDArray[np.bool_]:
    """Mask the length prefixes of elements in binary form."""
    mask = np.zeros(int(lengths.sum()) + PREFIX_SIZE * lengths.size, np.bool_)
    mask[_element_starts(lengths)] = True
    mask[1:] |= mask[:-1].copy()
    mask[2:] |= mask[:-2].copy()
    return mask


def pack_texts(lengths: Lengths, texts: Codes) -> bytes:
    """Return elements in binary form; ``texts`` holds their bytes, concatenated."""
    starts, has_length = _element_starts(lengths), mask_lengths(lengths)
    elements = np.zeros(has_length.size, np.uint8)
    elements[starts] = lengths
    for byte in range(1, PREFIX_SIZE):
        lengths = lengths >> 8
        if not lengths.any():
            break
        elements[starts + byte] = lengths
    place_bytes(elements, ~has_length, texts)
    return elements.tobytes()


def _element_starts(lengths: Lengths) -> Lengths:
    # Each element begins behind those before it, and their prefixes.
    starts: Lengths = np.cumsum(lengths) - lengths
    return starts + np.arange(0, PREFIX_SIZE * lengths.size, PREFIX_SIZE)


def place_bytes(target: Codes, mask: npt.NDArray[np.bool_], part: Codes) -> None:
    """Copy bytes to where the mask is set; numpy's own indexing takes twice the time."""
    if part.size:
        np.place(target, mask, part)


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


def read_lengths(data: bytes, position: int) -> tuple[list[int], int]:
    """Return the lengths of the complete elements from ``position`` on, and where they end."""
    lengths: list[int] = []
    append, length_at, width, size = lengths.append, _PREFIX.unpack_from, _PREFIX.size, len(data)
    while position + width <= size:
        (length,) = length_at(data, position)
        end = position + width + length
        if end > size:
            break
        append(length)
        position = end
    return lengths, position
