"""Base64: decodes BYTES tensors, and JSON strings in pieces."""

from __future__ import annotations

import re
from binascii import a2b_base64

from gateway.codec import native
from gateway.codec.elements.bytes_elements import (
    PREFIX_SIZE,
    PartialElement,
    pack_elements,
    read_length,
    split_elements,
)
from gateway.codec.elements.decode import TensorDecoder
from gateway.errors import GatewayError
from gateway.protocol.error_vocabulary import REQUEST, ErrorVocabulary

_ALPHABET = re.compile(rb"[A-Za-z0-9+/]*")


class Base64ElementDecoder:
    """Decodes the base64 elements of a BYTES tensor in place.

    A text must be exactly what encoding its bytes gives: the standard alphabet, padded, without
    white space (RFC 4648, section 4). ``label`` names the tensor in errors.
    """

    def __init__(self, label: str, tensor: TensorDecoder, words: ErrorVocabulary = REQUEST) -> None:
        self._label = label
        self._words = words
        self.tensor = tensor
        self._next = 0
        self._count = 0
        self._partial = b""
        self._long: PartialElement | None = None
        """An element whose text of ``_length`` bytes arrives in pieces; ``_done`` are decoded."""
        self._length = self._done = 0
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
        if self._long is None:
            position += self._decode_complete(data[position:])
            if len(data) - position >= PREFIX_SIZE:  # an element begins that is not complete yet
                self._length, self._done = read_length(data[position:]), 0
                self._long = PartialElement(self._decoded)
                self.tensor.size += PREFIX_SIZE
                position += PREFIX_SIZE
                position += self._continue_element(self._long, data[position:])
        self._partial = data[position:]

    def _decode_complete(self, data: bytes) -> int:
        """Decode the complete elements that data begin with; return where they end."""
        count, end, decoded = native.decode_base64_elements(data) or self._decode_each(data)
        self._count += count
        if count:
            self._decoded.append(decoded)
            self.tensor.size += len(decoded)
        return end

    def _decode_each(self, data: bytes) -> tuple[int, int, bytes]:
        """Decode the complete elements one by one; return their number, end and data."""
        texts, end = split_elements(data, 0)
        elements = []
        for index, text in enumerate(texts, self._count):
            element = native.decode_base64(text, True)
            if element is None:
                raise self._error(index, text, 0, len(text))
            elements.append(element)
        return len(elements), end, pack_elements(elements)

    def _continue_element(self, element: PartialElement, data: bytes) -> int:
        """Decode more of an element in groups of four characters; return how many it took."""
        missing = self._length - self._done
        used = missing if missing <= len(data) else len(data) - len(data) % 4
        text = data[:used]
        last = used == missing
        part = native.decode_base64(text, True)
        if part is None or (text.endswith(b"=") and not last):
            raise self._error(self._count, text, self._done, self._length)
        self._done += used
        element.append(part)
        self.tensor.size += len(part)
        if last:
            element.end()
            self._count += 1
            self._long = None
        return used

    def _error(self, index: int, text: bytes, start: int, length: int) -> GatewayError:
        """Make the error for text at offset ``start`` of an element of ``length`` characters."""
        reason = _describe_error(text, start, length)
        return self._words.malformed(
            f"{self._label}: element {index} is not base64, as its content_type says: {reason}"
        )


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
        if not last:
            whole = len(text) - len(text) % 4
            text, self._partial = text[:whole], text[whole:] + self._partial
        self._padded = text.endswith(b"=")
        if not self._padded:
            text += b"=" * (-len(text) % 4)
        data = native.decode_base64(text, False) if len(text) % 4 == 0 else None
        return a2b_base64(text, strict_mode=True) if data is None else data
