"""Encodes the binary form of a tensor as the text of JSON elements, chunk by chunk."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from gateway.codec import native
from gateway.codec.elements.bytes_elements import PREFIX_SIZE, read_length, split_elements
from gateway.codec.elements.rounding import read_numbers
from gateway.codec.offload_interface import Offloader, OffloadFuture
from gateway.codec.policies import NONFINITE_CODES, BytesEncoding, JsonPolicies, Nonfinite
from gateway.errors import GatewayError
from gateway.protocol.datatypes import Datatype, Family
from gateway.protocol.error_vocabulary import RESPONSE, ErrorVocabulary

TextChunk = bytes | memoryview
"""A part of the JSON; a view where brackets were cut off."""


class OffloadedText:
    """Text that ``size`` bytes of a tensor become elsewhere."""

    def __init__(
        self, size: int, future: OffloadFuture, encode_here: Callable[[], TextChunk]
    ) -> None:
        self.size = size
        self.future = future
        self._encode_here = encode_here
        self._has_failed = False

    def text(self) -> TextChunk:
        """Return the text once, when the future is done.

        Raises GatewayError as ``feed`` does, each time.
        """
        text = None if self._has_failed else self.future.take_result()
        self._has_failed = text is None
        return self._encode_here() if text is None else text


def join_text(parts: Iterable[TextChunk | OffloadedText]) -> bytes:
    """Join text that was encoded without an offloader."""
    return b"".join([part for part in parts if not isinstance(part, OffloadedText)])


def make_tensor_encoder(
    label: str, datatype: Datatype, policies: JsonPolicies, words: ErrorVocabulary = RESPONSE
) -> TensorEncoder:
    """Make the encoder of a datatype; ``label`` names the tensor in errors."""
    if datatype.family is Family.TEXT:
        as_base64 = policies.bytes_encoding is BytesEncoding.BASE64
        return BytesEncoder(label, native.BASE64 if as_base64 else native.TEXT, words)
    return NumberEncoder(label, datatype, policies.nonfinite, words)


def fast_encode_numbers(
    data: bytes | memoryview, datatype: Datatype, shape: tuple[int, ...] = ()
) -> TextChunk | None:
    """Encode complete elements, nested by their shape, without the outermost brackets.

    Returns None for elements that NumberEncoder must check: a policy decides on NaN and infinities.
    """
    code = native.DATATYPE_CODES.get(datatype.name)
    if code is not None:
        return native.encode_numbers(data, code, 0, False, shape)
    try:
        return NumberEncoder("", datatype, Nonfinite.ERROR).encode(data, 0, shape)
    except GatewayError:
        return None


class NumberEncoder:
    """Encodes numbers and booleans: elements of one size."""

    def __init__(
        self,
        label: str,
        datatype: Datatype,
        nonfinite: Nonfinite,
        words: ErrorVocabulary = RESPONSE,
    ) -> None:
        assert datatype.dtype is not None
        self.count = 0
        self._label = label
        self._words = words
        self._datatype = datatype
        self._code = native.DATATYPE_CODES.get(datatype.name)
        self._size = datatype.dtype.itemsize
        self._nonfinite = nonfinite
        self._partial = b""

    def feed(self, data: bytes | memoryview) -> TextChunk:
        """Encode the next bytes as far as they form complete elements.

        Raises GatewayError: 406 for a value that the policy refuses, 502 for invalid elements; 400
        for either in a request.
        """
        complete = self._complete_elements(data)
        return self._encode_next(complete) if complete else b""

    def parts(
        self, data: bytes | memoryview, offloader: Offloader | None
    ) -> list[TextChunk | OffloadedText]:
        """Encode the next bytes, and offload them where that is faster."""
        complete = self._complete_elements(data)
        if not complete:
            return []
        first, future = self.count, None
        if offloader is not None:
            future = offloader.encode(complete, self._datatype, self._nonfinite, first > 0)
        if future is None:
            return [self._encode_next(complete)]
        size = len(complete)
        self.count += size // self._size
        return [OffloadedText(size, future, lambda: self.encode(complete, first, (), first > 0))]

    def _complete_elements(self, data: bytes | memoryview) -> bytes | memoryview:
        """Return the bytes of the complete elements, and buffer the rest."""
        if self._partial:
            data = self._partial + data
        rest = len(data) % self._size
        if not rest:
            self._partial = b""
            return data
        self._partial = bytes(data[-rest:])
        return memoryview(data)[:-rest]

    def _encode_next(self, data: bytes | memoryview) -> TextChunk:
        text = self.encode(data, self.count, (), self.count > 0)
        self.count += len(data) // self._size
        return text

    def finish(self) -> None:
        """Raise GatewayError (502, 400) if the bytes ended inside an element."""
        if self._partial:
            raise self._words.malformed(f"{self._label} ends inside an element")

    def encode(
        self,
        data: bytes | memoryview,
        first: int = 0,
        shape: tuple[int, ...] = (),
        continued: bool = False,
    ) -> TextChunk:
        """Encode complete elements; the first is the tensor's element number ``first``.

        A shape nests them; the outermost array has no brackets. If they are ``continued``, a comma
        comes before them. Raises GatewayError as ``feed`` does.
        """
        if self._code is not None:
            nonfinite = NONFINITE_CODES[self._nonfinite]
            text = native.encode_numbers(data, self._code, nonfinite, continued, shape)
            if text is not None:
                return text
        view = self._encode_plainly(data, first, shape)
        return b"".join((b",", view)) if continued else view

    def _encode_plainly(
        self, data: bytes | memoryview, first: int, shape: tuple[int, ...]
    ) -> memoryview:
        """Encode by orjson, which gives floats the shortest digits; FP16 and BF16 those of FP32."""
        values = read_numbers(data, self._datatype)
        if self._datatype.family is Family.BOOLEAN and values.view(np.uint8).max(initial=0) > 1:
            raise self._words.malformed(
                f"{self._label} is BOOL, but holds bytes other than 0 and 1"
            )
        if self._datatype.family is Family.FLOAT:
            finite = np.isfinite(values)
            if not finite.all():
                return self._with_nonfinite(values, np.flatnonzero(~finite), first, shape)
        return _dump(values, shape)

    def _with_nonfinite(
        self,
        values: npt.NDArray[Any],
        offsets: npt.NDArray[np.intp],
        first: int,
        shape: tuple[int, ...],
    ) -> memoryview:
        if self._nonfinite is Nonfinite.ERROR:
            raise GatewayError(
                self._words.policy_violation,
                f"{self._label}: element {first + int(offsets[0])} is {values[offsets[0]]}, "
                f"which JSON does not have (policy nonfinite: error); "
                f"{self._words.instead_of_number}set another policy",
            )
        text = _dump(values, shape)  # orjson writes null for each
        if self._nonfinite is Nonfinite.NULL:
            return text
        tokens = _NONFINITE_TOKENS[self._nonfinite]
        special = values[offsets]
        kinds = np.where(np.isnan(special), 0, np.where(special > 0, 1, 2)).tolist()
        *pieces, last = bytes(text).split(b"null")
        written = zip(pieces, [tokens[kind] for kind in kinds], strict=True)
        return memoryview(b"".join((*chain.from_iterable(written), last)))


def _dump(values: npt.NDArray[Any], shape: tuple[int, ...]) -> memoryview:
    if shape:
        values = np.ascontiguousarray(values).reshape(shape)
    # A view, as the text is three times as large as the values.
    return memoryview(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY))[1:-1]


_NONFINITE_TOKENS = {
    Nonfinite.LITERAL: (b"NaN", b"Infinity", b"-Infinity"),
    Nonfinite.STRING: (b'"NaN"', b'"Infinity"', b'"-Infinity"'),
}


_QUOTES: Final = ((b'"', b'"'), (b'"', b'"'), (b'{"b64":"', b'"}'))
"""What stands around the text of an element, by its form."""


class BytesEncoder:
    """Encodes BYTES elements: each is a uint32 length and that many bytes.

    An incomplete element is written as its bytes arrive, so that large ones are not buffered.
    ``form`` is one that encode_strings knows.
    """

    def __init__(self, label: str, form: int, words: ErrorVocabulary = RESPONSE) -> None:
        self.count = 0
        self._label = label
        self._words = words
        self._form = form
        self._opening, self._closing = _QUOTES[form]
        self._partial = b""
        """Bytes that are not encoded yet: of a length, a character, or a group of base64."""
        self._missing = 0
        """Bytes of an incomplete element that are not encoded yet."""

    def feed(self, data: bytes | memoryview) -> bytes:
        """Encode the next bytes; raises GatewayError as NumberEncoder does."""
        return b"".join(self.pieces(data))

    def parts(
        self, data: bytes | memoryview, offloader: Offloader | None
    ) -> list[TextChunk | OffloadedText]:
        """Encode the next bytes here."""
        return [self.feed(data)]

    def pieces(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Yield the text of the next bytes."""
        data = self._partial + data
        position = 0
        if self._missing:
            position = yield from self._continue_element(data, position)
        if not self._missing:
            position = yield from self._encode_complete(data, position)
            if len(data) - position >= PREFIX_SIZE:
                yield self._begin_next() + self._opening
                self._missing = read_length(data[position : position + PREFIX_SIZE])
                position = yield from self._continue_element(data, position + PREFIX_SIZE)
        self._partial = data[position:]

    def finish(self) -> None:
        """Raise GatewayError (502, 400) if the bytes ended inside an element."""
        if self._missing or self._partial:
            raise self._words.malformed(f"{self._label} ends inside an element")

    def _lead(self) -> bytes:
        """Return the text before the next element."""
        return b"," if self.count else b""

    def _begin_next(self) -> bytes:
        lead = self._lead()
        self.count += 1
        return lead

    def _encode_complete(self, data: bytes, position: int) -> Generator[bytes, None, int]:
        """Yield the text of the complete elements from a position on; return where they end."""
        encoded = native.encode_strings(memoryview(data)[position:], self._form, self.count)
        if encoded is not None:
            count, size, text = encoded
            self.count += count
            yield text
            return position + size
        complete, end = split_elements(data, position)
        if complete:
            yield self._lead()
            yield b",".join(self._encode_elements(complete, self.count))
            self.count += len(complete)
        return end

    def _encode_elements(self, elements: list[bytes], first: int) -> list[bytes]:
        """Encode complete elements, of which the first is element number ``first``."""
        if self._form != native.TEXT:
            encode = native.encode_base64
            return [b"".join((self._opening, encode(each), self._closing)) for each in elements]
        try:
            return list(map(orjson.dumps, map(bytes.decode, elements)))
        except UnicodeDecodeError as error:
            raise self._not_utf8_error(first + elements.index(error.object)) from None

    def _continue_element(self, data: bytes, position: int) -> Generator[bytes, None, int]:
        """Yield the text of more of an element from a position on; return where that ends."""
        part = data[position : position + self._missing]
        text, used = self._encode_part(part, len(part) == self._missing)
        self._missing -= used
        yield text if self._missing else text + self._closing
        return position + used

    def _encode_part(self, part: bytes, last: bool) -> tuple[bytes, int]:
        """Encode bytes of an element as far as they are complete; return how many that are."""
        if self._form != native.TEXT:
            used = len(part) if last else len(part) - len(part) % 3
            return native.encode_base64(part[:used]), used
        used, text = native.encode_text(part) or (0, b"")
        try:
            # Mostly nothing is left, or a character that is incomplete.
            rest, decoded = utf_8_decode(part[used:], "strict", last)
        except UnicodeDecodeError:
            raise self._not_utf8_error(self.count - 1) from None
        return text + orjson.dumps(rest)[1:-1] if rest else text, used + decoded

    def _not_utf8_error(self, index: int) -> GatewayError:
        """Make the error for an element that is not text and so cannot be a JSON string."""
        return GatewayError(
            self._words.policy_violation,
            f"{self._label}: element {index} is not UTF-8 text, which JSON needs; "
            f"{self._words.instead_of_text}set the policy bytes: base64",
        )


TensorEncoder = NumberEncoder | BytesEncoder
"""Encodes the binary form of one tensor as the text between its array's brackets."""
