"""Encodes the binary form of a tensor as the text of JSON elements, chunk by chunk."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from gateway.codec import native
from gateway.codec.elements.base64_elements import encode_base64
from gateway.codec.elements.bytes_elements import PREFIX_SIZE, read_length, split_elements
from gateway.codec.elements.fast_decode import native_code
from gateway.codec.json.text_search import contains
from gateway.codec.native import encode_numbers
from gateway.codec.offload_interface import ConversionJob, Offloader, OffloadFuture
from gateway.codec.policies import BytesEncoding, JsonPolicies, Nonfinite
from gateway.errors import GatewayError
from gateway.protocol.datatypes import Datatype, Family
from gateway.protocol.error_vocabulary import RESPONSE, ErrorVocabulary

TextChunk = bytes | memoryview
"""A part of the JSON; a view where brackets were cut off."""

NONFINITE_CODES = {
    Nonfinite.ERROR: 0,
    Nonfinite.NULL: 1,
    Nonfinite.LITERAL: 2,
    Nonfinite.STRING: 3,
}
"""The codes that the C module knows: encode_numbers.h."""


class TensorEncoder(Protocol):
    """Encodes the binary form of one tensor as the text between its array's brackets."""

    count: int
    """Elements encoded so far."""

    def feed(self, data: bytes | memoryview) -> TextChunk:
        """Encode the next bytes as far as they form complete elements.

        Raises GatewayError: 406 for a value that the policy refuses, 502 for invalid elements; 400
        for either in a request.
        """

    def parts(
        self, data: bytes | memoryview, offloader: Offloader
    ) -> list[TextChunk | OffloadedText]:
        """Encode the next bytes as ``feed`` does, but offload parts of them."""

    def finish(self) -> None:
        """Raise GatewayError (502, 400) if the bytes ended inside an element."""


class OffloadedText:
    """Text that is encoded elsewhere."""

    def __init__(self, future: OffloadFuture, encode_here: Callable[[], TextChunk]) -> None:
        self.future = future
        self._encode_here = encode_here

    def text(self) -> TextChunk:
        """Return the text once the future is done; raises GatewayError as ``feed`` does."""
        return self._encode_here() if self.future.result is None else self.future.result


def join_text(parts: Iterable[TextChunk | OffloadedText]) -> bytes:
    """Join text that was encoded without an offloader."""
    return b"".join([part for part in parts if not isinstance(part, OffloadedText)])


def make_tensor_encoder(
    label: str, datatype: Datatype, policies: JsonPolicies, words: ErrorVocabulary = RESPONSE
) -> TensorEncoder:
    """Make the encoder of a datatype; ``label`` names the tensor in errors."""
    if datatype.family is Family.TEXT:
        return _BytesEncoder(label, policies.bytes_encoding, words)
    return NumberEncoder(label, datatype, policies.nonfinite, words)


_ORJSON_DTYPES = frozenset(
    map(np.dtype, ("?", "<u1", "<u2", "<u4", "<u8", "<i1", "<i2", "<i4", "<i8", "<f4", "<f8"))
)
"""What orjson writes; floats get the shortest digits that identify them."""


def json_dtype(datatype: Datatype) -> np.dtype[Any]:
    """Return the dtype to write elements in: one that orjson knows and that holds them all."""
    assert datatype.dtype is not None
    if datatype.dtype in _ORJSON_DTYPES:
        return datatype.dtype
    # float32 holds every FP16 and BF16.
    return np.dtype("<f4" if datatype.family is Family.FLOAT else "<i8")


def can_encode_fast(datatype: Datatype) -> bool:
    """Tell whether fast_encode_numbers takes elements of a datatype."""
    if encode_numbers is not None and native_code(datatype) is not None:
        return True
    # orjson would write any BOOL.
    is_number = datatype.family in (Family.INTEGER, Family.FLOAT)
    return is_number and json_dtype(datatype) == datatype.dtype


def fast_encode_numbers(
    data: bytes | memoryview, datatype: Datatype, shape: tuple[int, ...] = ()
) -> TextChunk | None:
    """Encode complete elements, nested by their shape, without the outermost brackets.

    Returns None for elements that NumberEncoder must check: a policy decides on NaN and infinities.
    """
    code = native_code(datatype)
    if encode_numbers is not None and code is not None:
        return encode_numbers(data, code, 0, shape)
    values = np.frombuffer(data, datatype.dtype)
    if len(shape) > 1:
        values = values.reshape(shape)
    text = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    # null for NaN or an infinity
    return None if contains(text, b"n") else memoryview(text)[1:-1]


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
        self._code = native_code(datatype)
        self._dtype = datatype.dtype
        self._size = datatype.dtype.itemsize
        self._nonfinite = nonfinite
        self._partial = b""

    def feed(self, data: bytes | memoryview) -> TextChunk:
        """Encode the next bytes; see TensorEncoder."""
        complete = self._complete_elements(data)
        return self._encode_next(complete) if complete else b""

    def parts(
        self, data: bytes | memoryview, offloader: Offloader
    ) -> list[TextChunk | OffloadedText]:
        """Encode the next bytes, and offload them where that is faster."""
        complete = self._complete_elements(data)
        if not complete:
            return []
        first = self.count
        job = ConversionJob(True, self._datatype, self._nonfinite, continued=first > 0)
        future = offloader.submit(job, complete) if job.can_be_offloaded else None
        if future is None:
            return [self._encode_next(complete)]
        self.count += len(complete) // self._size
        return [OffloadedText(future, lambda: self.encode(complete, first, (), first > 0))]

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
        if encode_numbers is not None and self._code is not None:
            nonfinite = NONFINITE_CODES[self._nonfinite]
            text = encode_numbers(data, self._code, nonfinite, shape, continued)
            if text is not None:
                return text
        view = self._pure_encode(data, first, shape)
        return b"".join((b",", view)) if continued else view

    def _pure_encode(
        self, data: bytes | memoryview, first: int, shape: tuple[int, ...]
    ) -> memoryview:
        values = np.frombuffer(data, self._dtype)
        if self._dtype.kind == "b" and values.view(np.uint8).max() > 1:
            raise self._words.malformed(
                f"{self._label} is BOOL, but holds bytes other than 0 and 1"
            )
        values = values.astype(json_dtype(self._datatype), copy=False)
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
        is_nan = np.isnan(special)
        if is_nan.all():
            return memoryview(bytes(text).replace(b"null", tokens[0]))
        kinds = np.where(is_nan, 0, np.where(special > 0, 1, 2)).tolist()
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


class _BytesEncoder:
    """Encodes BYTES elements: each is a uint32 length and that many bytes.

    An incomplete element is written as its bytes arrive, so that large ones are not buffered.
    """

    def __init__(self, label: str, bytes_encoding: BytesEncoding, words: ErrorVocabulary) -> None:
        self.count = 0
        self._label = label
        self._words = words
        self._encoding = bytes_encoding
        self._partial = b""
        self._element: ElementWriter | None = None
        self._missing = 0

    def feed(self, data: bytes | memoryview) -> bytes:
        data = self._partial + data
        out = []
        position = 0
        if self._element is not None:
            position = min(self._missing, len(data))
            out.append(self._continue_element(self._element, data[:position]))
        text, position = self._encode_complete(data, position)
        out.append(text)
        self._partial = data[position:]
        if self._element is None and len(self._partial) >= PREFIX_SIZE:
            out.append(self._begin_element(self._partial))
            self._partial = b""
        return b"".join(out)

    def parts(
        self, data: bytes | memoryview, offloader: Offloader
    ) -> list[TextChunk | OffloadedText]:
        return [self.feed(data)]

    def finish(self) -> None:
        if self._element is not None or self._partial:
            raise self._words.malformed(f"{self._label} ends inside an element")

    def _separator(self) -> bytes:
        return b"," if self.count else b""

    def _encode_complete(self, data: bytes, position: int) -> tuple[bytes, int]:
        """Encode the complete elements from a position on; return the text, and where they end."""
        if native.encode_strings is not None:
            form = native.BASE64 if self._encoding is BytesEncoding.BASE64 else native.TEXT
            encoded = native.encode_strings(memoryview(data)[position:], form, self.count)
            if encoded is not None:
                count, size, text = encoded
                self.count += count
                return text, position + size
        complete, end = split_elements(data, position)
        if not complete:
            return b"", end
        text = self._separator() + self._encode_elements(complete)
        self.count += len(complete)
        return text, end

    def _encode_elements(self, elements: list[bytes]) -> bytes:
        if self._encoding is BytesEncoding.BASE64:
            return b'"' + b'","'.join(map(encode_base64, elements)) + b'"'
        try:
            texts = list(map(bytes.decode, elements))
        except UnicodeDecodeError as error:
            index = self.count + elements.index(error.object)
            raise _not_utf8_error(self._label, index, self._words) from None
        return orjson.dumps(texts)[1:-1]

    def _begin_element(self, data: bytes) -> bytes:
        self._missing = read_length(data)
        base64 = self._encoding is BytesEncoding.BASE64
        self._element = (
            Base64ElementWriter()
            if base64
            else Utf8ElementWriter(self._label, self.count, self._words)
        )
        opening = self._separator() + b'"'
        self.count += 1
        return opening + self._continue_element(self._element, data[PREFIX_SIZE:])

    def _continue_element(self, element: ElementWriter, data: bytes) -> bytes:
        self._missing -= len(data)
        if self._missing:
            return element.feed(data, last=False)
        self._element = None
        return element.feed(data, last=True) + b'"'


def _not_utf8_error(label: str, index: int, words: ErrorVocabulary) -> GatewayError:
    """Make the error for an element that is not text and so cannot be a JSON string."""
    return GatewayError(
        words.policy_violation,
        f"{label}: element {index} is not UTF-8 text, which JSON needs; "
        f"{words.instead_of_text}set the policy bytes: base64",
    )


class ElementWriter(Protocol):
    """Writes one element between its quotes while its bytes arrive."""

    def feed(self, data: bytes, last: bool) -> bytes:
        """Encode the next bytes; ``last`` marks the last of them."""


class Utf8ElementWriter:
    """Writes an element as text; raises GatewayError (406) if it is not UTF-8."""

    def __init__(self, label: str, index: int, words: ErrorVocabulary = RESPONSE) -> None:
        self._label = label
        self._words = words
        self._index = index
        self._partial = b""

    def feed(self, data: bytes, last: bool) -> bytes:
        """Encode the next bytes."""
        data = self._partial + data
        encoded = native.encode_text(data) if native.encode_text is not None else None
        used, text = encoded or (0, b"")
        try:
            # Mostly nothing is left, or a character that is incomplete.
            rest, decoded = utf_8_decode(data[used:], "strict", last)
        except UnicodeDecodeError:
            raise _not_utf8_error(self._label, self._index, self._words) from None
        self._partial = data[used + decoded :]
        return text + orjson.dumps(rest)[1:-1] if rest else text


class Base64ElementWriter:
    """Writes an element as base64."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes, last: bool) -> bytes:
        """Encode the next bytes as far as they form groups of three."""
        data = self._partial + data
        complete = len(data) if last else len(data) - len(data) % 3
        self._partial = data[complete:]
        return encode_base64(data[:complete])
