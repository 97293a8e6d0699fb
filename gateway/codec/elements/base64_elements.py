"""Base64: encodes bytes; decodes BYTES tensors, JSON strings in pieces, and many short texts."""

from __future__ import annotations

import re
from binascii import Error, a2b_base64, b2a_base64
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gateway.codec import native
from gateway.codec.elements.bytes_elements import (
    PREFIX_SIZE,
    Codes,
    Lengths,
    PartialElement,
    find_short_lengths,
    mask_lengths,
    pack_elements,
    pack_texts,
    read_length,
    read_lengths,
    split_elements,
)
from gateway.errors import GatewayError
from gateway.protocol.error_vocabulary import REQUEST, ErrorVocabulary

_MANY = 64
"""From this number of elements on, numpy decodes short ones faster than Python."""
_SHORT = 64
"""Up to this average length in bytes, likewise."""

_ALPHABET = re.compile(rb"[A-Za-z0-9+/]*")
_PADDING = (b"", b"===", b"==", b"=")
"""What a text lacks, by its length modulo 4."""

encode_base64: Callable[[bytes], bytes] = native.encode_base64 or partial(b2a_base64, newline=False)
"""Encodes bytes as base64 with padding, without a line break."""


class BytesTensor(Protocol):
    """A tensor of BYTES in binary form; ``size`` counts the bytes of its chunks."""

    chunks: list[bytes]
    size: int


class Base64ElementDecoder:
    """Decodes the base64 elements of a BYTES tensor in place.

    A text must be exactly what encoding its bytes gives: the standard alphabet, padded, without
    white space (RFC 4648, section 4). ``label`` names the tensor in errors.
    """

    def __init__(self, label: str, tensor: BytesTensor, words: ErrorVocabulary = REQUEST) -> None:
        self._label = label
        self._words = words
        self.tensor = tensor
        self._next = 0
        self._count = 0
        self._partial = b""
        self._long: _LongText | None = None
        self._decoded: list[bytes] = []

    def decode_chunk(self) -> bool:
        """Decode the next chunk of the tensor; return whether there was one.

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
            position = self._continue_element(self._long, data)
        # An incomplete group of four characters is shorter than a length prefix.
        data = data[position:]
        self._partial = data[self._decode_complete(data) :]
        if self._long is None and len(self._partial) >= PREFIX_SIZE:
            self._begin_element(self._partial)

    def _append(self, data: bytes) -> None:
        self._decoded.append(data)
        self.tensor.size += len(data)

    def _decode_complete(self, data: bytes) -> int:
        """Decode the complete elements that data begin with; return where they end."""
        if native.decode_base64_elements is not None:
            found = native.decode_base64_elements(data)
            if found is not None:
                count, end, decoded = found
                self._count += count
                if count:
                    self._append(decoded)
                return end
        short = find_short_lengths(data) if len(data) >= _MANY * PREFIX_SIZE else None
        lengths, end = short or read_lengths(data, 0)
        if len(lengths):
            self._append(self._decode_elements(data[:end], lengths))
        return end

    def _decode_elements(self, data: bytes, lengths: Lengths | list[int]) -> bytes:
        """Decode complete elements into binary form."""
        if len(lengths) >= _MANY and len(data) <= _SHORT * len(lengths):
            sizes = np.asarray(lengths)
            texts = np.compress(~mask_lengths(sizes), np.frombuffer(data, np.uint8))
            decoded = decode_texts(sizes, texts, canonical=True)
            if decoded is not None:
                self._count += len(lengths)
                return pack_texts(*decoded)
        return self._decode_each(split_elements(data, 0)[0])

    def _decode_each(self, texts: list[bytes]) -> bytes:
        try:
            elements = list(map(a2b_base64, texts))
        except Error:
            elements = []
        if list(map(encode_base64, elements)) != texts:
            raise self._first_error(texts)
        self._count += len(elements)
        return pack_elements(elements)

    def _begin_element(self, data: bytes) -> None:
        """Begin an element that is not complete yet."""
        self._long = _LongText(read_length(data), PartialElement(self._decoded))
        self.tensor.size += PREFIX_SIZE
        text = data[PREFIX_SIZE:]
        self._partial = text[self._continue_element(self._long, text) :]

    def _continue_element(self, long: _LongText, data: bytes) -> int:
        """Decode more of an element in groups of four characters; return how many it took."""
        missing = long.length - long.done
        used = missing if missing <= len(data) else len(data) - len(data) % 4
        text = data[:used]
        last = used == missing
        part = _decode_canonical(text)
        if part is None or (text.endswith(b"=") and not last):
            raise self._error(self._count, text, long.done, long.length)
        long.done += used
        long.element.append(part)
        self.tensor.size += len(part)
        if last:
            long.element.end()
            self._count += 1
            self._long = None
        return used

    def _first_error(self, texts: list[bytes]) -> GatewayError:
        for index, text in enumerate(texts):
            try:
                is_valid = encode_base64(a2b_base64(text)) == text
            except Error:
                is_valid = False
            if not is_valid:
                return self._error(self._count + index, text, 0, len(text))
        raise AssertionError("one of the texts is not base64")

    def _error(self, index: int, text: bytes, start: int, length: int) -> GatewayError:
        """Make the error for text at offset ``start`` of an element of ``length`` characters."""
        reason = _describe_error(text, start, length)
        return self._words.malformed(
            f"{self._label}: element {index} is not base64, as its content_type says: {reason}"
        )


def _decode_canonical(text: bytes) -> bytes | None:
    """Decode what encoding gives; return None for any other text."""
    if native.decode_base64 is not None:
        return native.decode_base64(text, True)
    try:
        data = a2b_base64(text)
    except Error:
        return None
    return data if encode_base64(data) == text else None


class _LongText:
    """An element whose text arrives in pieces; ``done`` of its ``length`` bytes are decoded."""

    def __init__(self, length: int, element: PartialElement) -> None:
        self.length = length
        self.element = element
        self.done = 0


def _describe_error(text: bytes, start: int, length: int) -> str:
    """Say what is wrong with text at offset ``start`` of an element of ``length`` characters."""
    valid = _ALPHABET.match(text)
    at = valid.end() if valid is not None else 0
    character = text[at : at + 4].decode("utf-8", "replace")[:1]
    if character not in ("", "="):
        return f"character {start + at} ({character!r}) is not in the base64 alphabet"
    if character and (start + at < length - 2 or text[at:].strip(b"=")):
        return f"its padding begins at character {start + at} of {length}"
    if length % 4:
        return f"its length of {length} is not a multiple of 4"
    return "its last character has unused bits that are not zero"


class Base64Decoder:
    """Decodes the base64 between the quotes of a JSON string while it arrives.

    It takes the standard alphabet. Padding may be missing, as TensorFlow Serving allows. Raises
    ValueError that says what is wrong.
    """

    def __init__(self) -> None:
        self._partial = b""
        self._padded = False

    def feed(self, text: bytes, last: bool) -> bytes:
        """Decode the next text as far as it is complete; ``last`` marks the end."""
        text = self._partial + text
        cut = len(text) if last else len(text) - text.endswith(b"\\")
        text, self._partial = text[:cut], text[cut:]
        if b"\\" in text:
            # PHP escapes slashes; no other character of base64 has an escape.
            text = text.replace(b"\\/", b"/")
        if self._padded and text:
            raise ValueError("text behind the padding")
        if last and not text.endswith(b"="):
            text += b"=" * (-len(text) % 4)
        elif not last:
            whole = len(text) - len(text) % 4
            text, self._partial = text[:whole], text[whole:] + self._partial
        self._padded = text.endswith(b"=")
        return _decode_strictly(text) if text else b""


def _decode_strictly(text: bytes) -> bytes:
    """Decode a text with its padding; raises ValueError that says what is wrong."""
    if native.decode_base64 is not None and len(text) % 4 == 0:
        data = native.decode_base64(text, False)
        if data is not None:
            return data
    return a2b_base64(text, strict_mode=True)


def decode_base64(text: bytes) -> bytes:
    """Decode a complete text without escapes; raises ValueError."""
    if not text.endswith(b"="):
        # Fast path: most texts have all of their padding or none.
        return a2b_base64(text + _PADDING[len(text) % 4], strict_mode=True)
    return Base64Decoder().feed(text, last=True)


def pad_texts(lengths: Lengths, texts: Codes) -> tuple[Lengths, Codes] | None:
    """Pad texts that lack all of their padding; return None if one has only a part of it.

    ``texts`` holds their characters, concatenated.
    """
    missing = -lengths & 3
    if not missing.any():
        return lengths, texts
    has_some = (missing > 0) & (texts[np.maximum(np.cumsum(lengths) - 1, 0)] == ord("="))
    if (missing == 3).any() or has_some.any():
        return None
    lengths = lengths + missing
    is_text = _mask_without_last(lengths, missing)
    padded = np.full(is_text.size, ord("="), np.uint8)
    np.place(padded, is_text, texts)
    return lengths, padded


def decode_texts(lengths: Lengths, texts: Codes, canonical: bool) -> tuple[Lengths, Codes] | None:
    """Decode padded, concatenated texts; return the lengths and the bytes, concatenated too.

    Returns None if one is not base64 or, with ``canonical``, if unused bits of its last character
    are not zero.
    """
    if (lengths & 3).any():
        return None
    ends = np.cumsum(lengths)[lengths > 0]
    is_padding = texts == ord("=")
    padding = np.zeros(lengths.size, np.intp)
    padding[lengths > 0] = is_padding[ends - 1] * (1 + is_padding[ends - 2].astype(np.intp))
    if np.count_nonzero(is_padding) != padding.sum():
        return None
    try:
        # One call decodes all texts: each consists of groups of four once padding counts as data.
        text = texts.tobytes().replace(b"=", b"A")
        data = np.frombuffer(a2b_base64(text, strict_mode=True), np.uint8)
    except Error:
        return None
    sizes = lengths // 4 * 3
    is_data = _mask_without_last(sizes, padding)
    if canonical and np.compress(~is_data, data).any():
        return None
    return sizes - padding, np.compress(is_data, data)


def _mask_without_last(lengths: Lengths, counts: Lengths) -> npt.NDArray[np.bool_]:
    """Mask the bytes of concatenated texts but for the last ``counts`` (0 to 2) of each."""
    ends = np.cumsum(lengths)
    others = np.ones(int(lengths.sum()), np.bool_)
    for count in (1, 2):
        others[ends[counts >= count] - count] = False
    return others
