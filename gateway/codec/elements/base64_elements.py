"""BYTES elements whose text is base64: decoded where they are held."""

from __future__ import annotations

import re
import struct
from binascii import Error, a2b_base64, b2a_base64
from functools import partial
from itertools import chain

import numpy as np

from gateway.codec.elements.base64_text import Lengths, decode_texts
from gateway.codec.elements.decode import TensorDecoder
from gateway.codec.elements.encode import read_lengths, split_elements
from gateway.codec.elements.fast_strings import find_short_lengths, mask_lengths, pack_texts
from gateway.errors import GatewayError
from gateway.protocol.error_vocabulary import REQUEST, ErrorVocabulary

_LENGTH = struct.Struct("<I")
_MANY = 64
"""Elements from which on they are decoded without a Python object for each,"""
_SHORT = 64
"""and bytes of each up to which that takes less time."""
_PLAIN = re.compile(rb"[A-Za-z0-9+/]*")

_encode = partial(b2a_base64, newline=False)


class Base64ElementDecoder:
    """Decodes the elements of a tensor, which holds their texts and gets their bytes instead.

    A text must be what encoding its bytes gives: the standard alphabet, padded, without white
    space (RFC 4648, section 4). ``label`` names the tensor of the
    message in errors.
    """

    def __init__(
        self, label: str, tensor: TensorDecoder, message: ErrorVocabulary = REQUEST
    ) -> None:
        self._label = label
        self._message = message
        self.tensor = tensor
        self._next = 0
        self._count = 0
        self._partial = b""
        self._long: _LongText | None = None
        self._decoded: list[bytes] = []

    def decode_piece(self) -> bool:
        """Decode the next chunk of the tensor; tell whether there was one.

        Raises GatewayError (400, 502) that names the element and what is wrong with its text.
        """
        texts = self.tensor.chunks
        if self._next == len(texts):
            self.tensor.chunks = self._decoded
            return False
        data, texts[self._next] = texts[self._next], b""
        self._next += 1
        self.tensor.size -= len(data)
        self._feed(self._partial + data)
        return True

    def _feed(self, data: bytes) -> None:
        position = 0
        if self._long is not None:
            position = self._continue(self._long, data)
        # What is left of a group of four is less than the length that an element begins with.
        data = data[position:]
        short = find_short_lengths(data) if len(data) >= _MANY * _LENGTH.size else None
        lengths, position = short or read_lengths(data, 0)
        if len(lengths):
            self._hold(self._whole(data[:position], lengths))
        self._partial = data[position:]
        if self._long is None and len(self._partial) >= _LENGTH.size:
            self._begin(self._partial)

    def _whole(self, data: bytes, lengths: Lengths | list[int]) -> bytes:
        """Decode whole elements; give them in binary form."""
        if len(lengths) >= _MANY and len(data) <= _SHORT * len(lengths):
            sizes = np.asarray(lengths)
            texts = np.compress(~mask_lengths(sizes), np.frombuffer(data, np.uint8))
            decoded = decode_texts(sizes, texts, canonical=True)
            if decoded is not None:
                self._count += len(lengths)
                return pack_texts(*decoded)
        return self._each(split_elements(data, 0)[0])

    def _each(self, texts: list[bytes]) -> bytes:
        try:
            elements = list(map(a2b_base64, texts))
        except Error:
            elements = []
        if list(map(_encode, elements)) != texts:
            raise self._fault_among(texts)
        self._count += len(elements)
        lengths = map(_LENGTH.pack, map(len, elements))
        return b"".join(chain.from_iterable(zip(lengths, elements, strict=True)))

    def _begin(self, data: bytes) -> None:
        """Begin an element that is not whole yet; a place is kept for its length."""
        (length,) = _LENGTH.unpack_from(data)
        self._long = _LongText(length, len(self._decoded))
        self._hold(bytes(_LENGTH.size))
        text = data[_LENGTH.size :]
        self._partial = text[self._continue(self._long, text) :]

    def _continue(self, long: _LongText, data: bytes) -> int:
        """Decode more of an element, in groups of four characters; tell how many were."""
        missing = long.length - long.done
        used = missing if missing <= len(data) else len(data) - len(data) % 4
        text = data[:used]
        last = used == missing
        try:
            part = a2b_base64(text)
        except Error:
            part = b""
        if _encode(part) != text or (text.endswith(b"=") and not last):
            raise self._fault(self._count, text, long)
        long.done += used
        long.size += len(part)
        self._hold(part)
        if last:
            self._decoded[long.place] = _LENGTH.pack(long.size)
            self._count += 1
            self._long = None
        return used

    def _hold(self, data: bytes) -> None:
        self._decoded.append(data)
        self.tensor.size += len(data)

    def _fault_among(self, texts: list[bytes]) -> GatewayError:
        for index, text in enumerate(texts):
            try:
                fine = _encode(a2b_base64(text)) == text
            except Error:
                fine = False
            if not fine:
                return self._fault(self._count + index, text, _LongText(len(text)))
        raise AssertionError("one of the texts is not base64")

    def _fault(self, index: int, text: bytes, element: _LongText) -> GatewayError:
        """Make the error for a text, of which ``done`` characters stand before it."""
        fault = _fault_in(text, element.done, element.length)
        return self._message.malformed(
            f"{self._label}: element {index} is not base64, as its content_type says: {fault}"
        )


class _LongText:
    """The text of an element that comes in pieces: its length, and how much of it was decoded.

    ``place`` is that of the element's length among the decoded chunks, ``size`` in bytes.
    """

    def __init__(self, length: int, place: int = 0) -> None:
        self.length = length
        self.place = place
        self.done = 0
        self.size = 0


def _fault_in(text: bytes, start: int, length: int) -> str:
    """Say what is wrong with text that stands at ``start`` in an element of so many characters."""
    plain = _PLAIN.match(text)
    at = plain.end() if plain is not None else 0
    mark = text[at : at + 4].decode("utf-8", "replace")[:1]
    if mark not in ("", "="):
        return f"character {start + at} ({mark!r}) is not of its alphabet"
    if mark and (start + at < length - 2 or text[at:].strip(b"=")):
        return f"its padding begins at character {start + at} of {length}"
    if length % 4:
        return f"its length of {length} is no multiple of 4"
    return "its last character holds bits behind the last byte"
