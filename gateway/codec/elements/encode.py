"""Little-endian bytes of a tensor → the text of its JSON elements, chunk by chunk."""

from __future__ import annotations

import binascii
import codecs
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from gateway.codec.elements.bytes_elements import PREFIX_SIZE, read_length, split_elements
from gateway.codec.offload import ConversionJob, Offloader, OffloadFuture
from gateway.codec.policies import BytesEncoding, JsonPolicies, Nonfinite
from gateway.errors import GatewayError
from gateway.protocol.datatypes import Datatype, Family
from gateway.protocol.error_vocabulary import RESPONSE, ErrorVocabulary

_base64 = partial(binascii.b2a_base64, newline=False)


TextChunk = bytes | memoryview
"""A part of the JSON: a view where the brackets around it are left out."""


class TensorEncoder(Protocol):
    """Takes the bytes of one tensor; gives the text between the brackets of its array."""

    count: int
    """Elements seen so far."""

    def feed(self, data: bytes | memoryview) -> bytes:
        """Convert the next bytes, as far as they make up whole elements.

        Raises GatewayError: 406 for a value that the policy refuses, 502 for broken elements; 400
        for either in a request.
        """

    def parts(
        self, data: bytes | memoryview, offloader: Offloader
    ) -> list[TextChunk | OffloadedText]:
        """Convert the next bytes as ``feed`` does, parts of them perhaps elsewhere."""

    def finish(self) -> None:
        """Raise GatewayError (502, 400) where the bytes ended inside an element."""


class OffloadedText:
    """Text that is written elsewhere."""

    def __init__(self, future: OffloadFuture, encode_here: Callable[[], TextChunk]) -> None:
        self.future = future
        self._encode_here = encode_here

    def text(self) -> TextChunk:
        """Give the text once the loan is done; raises GatewayError as ``feed`` does."""
        return self._encode_here() if self.future.result is None else self.future.result


def make_tensor_encoder(
    label: str, datatype: Datatype, policies: JsonPolicies, message: ErrorVocabulary = RESPONSE
) -> TensorEncoder:
    """Choose the converter of a datatype; ``label`` names the tensor of the message in errors."""
    if datatype.family is Family.TEXT:
        return _BytesEncoder(label, policies.bytes_encoding, message)
    return NumberEncoder(label, datatype, policies.nonfinite, message)


_ORJSON_DTYPES = frozenset(
    map(np.dtype, ("?", "<u1", "<u2", "<u4", "<u8", "<i1", "<i2", "<i4", "<i8", "<f4", "<f8"))
)
"""What orjson writes, floats with the shortest digits that give the same number."""


def json_dtype(datatype: Datatype) -> np.dtype[Any]:
    """Give the dtype in which elements become text: one that holds them all, and orjson knows."""
    assert datatype.dtype is not None
    if datatype.dtype in _ORJSON_DTYPES:
        return datatype.dtype
    # float32 holds every FP16 and BF16; orjson knows only the former.
    return np.dtype("<f4" if datatype.family is Family.FLOAT else "<i8")


class NumberEncoder:
    """Numbers and truth values: elements of one size."""

    def __init__(
        self,
        label: str,
        datatype: Datatype,
        nonfinite: Nonfinite,
        message: ErrorVocabulary = RESPONSE,
    ) -> None:
        assert datatype.dtype is not None
        self.count = 0
        self._label = label
        self._message = message
        self._job = ConversionJob(to_json=True, datatype=datatype)
        self._dtype = datatype.dtype
        self._json_dtype = json_dtype(datatype)
        self._is_float = datatype.family is Family.FLOAT
        self._nonfinite = nonfinite
        self._partial = b""

    def feed(self, data: bytes | memoryview) -> bytes:
        """Convert the next bytes, as TensorEncoder says."""
        values = self._complete_values(data)
        return b"".join(self._encode_values(values)) if values.size else b""

    def parts(
        self, data: bytes | memoryview, offloader: Offloader
    ) -> list[TextChunk | OffloadedText]:
        """Convert the next bytes, parts of them perhaps elsewhere."""
        values = self._complete_values(data)
        if not values.size:
            return []
        future = None
        if self._job.can_be_offloaded:
            future = offloader.submit(self._job, values.view(np.uint8).data)
        if future is None:
            return [*self._encode_values(values)]
        first = self.count
        self.count += values.size
        lent = OffloadedText(future, lambda: self._encode_checked(values, first))
        return [b",", lent] if first else [lent]

    def encode_all(self, data: bytes | memoryview) -> memoryview:
        """Convert the bytes of a whole tensor; raises GatewayError as ``feed`` does."""
        return self._encode_checked(np.frombuffer(data, self._dtype), 0)

    def _complete_values(self, data: bytes | memoryview) -> npt.NDArray[Any]:
        """Give the whole elements that are there by now, and keep what is left."""
        if self._partial:
            data = self._partial + data
        whole = len(data) - len(data) % self._dtype.itemsize
        self._partial = bytes(data[whole:])
        return np.frombuffer(data, self._dtype, whole // self._dtype.itemsize)

    def _encode_values(self, values: npt.NDArray[Any]) -> list[TextChunk]:
        # Text is not joined here, which would copy it.
        text = self._encode_checked(values, self.count)
        separator: list[TextChunk] = [b","] if self.count else []
        self.count += values.size
        return [*separator, text]

    def finish(self) -> None:
        """Raise GatewayError (502) where the bytes ended inside an element."""
        if self._partial:
            raise self._message.malformed(f"{self._label} ends inside an element")

    def _encode_checked(self, values: npt.NDArray[Any], first: int) -> memoryview:
        """Write values, of which the first is the tensor's element number ``first``."""
        if self._dtype.kind == "b" and values.view(np.uint8).max() > 1:
            raise self._message.malformed(
                f"{self._label} is BOOL, but holds bytes other than 0 and 1"
            )
        values = values.astype(self._json_dtype, copy=False)
        if self._is_float:
            finite = np.isfinite(values)
            if not finite.all():
                return self._with_nonfinite(values, np.flatnonzero(~finite), first)
        return self._dump(values)

    def _with_nonfinite(
        self, values: npt.NDArray[Any], places: npt.NDArray[np.intp], first: int
    ) -> memoryview:
        if self._nonfinite is Nonfinite.ERROR:
            raise GatewayError(
                self._message.policy_violation,
                f"{self._label}: element {first + int(places[0])} is {values[places[0]]}, "
                f"which JSON does not have (policy nonfinite: error); "
                f"{self._message.instead_of_number}set another policy",
            )
        text = self._dump(values)  # orjson writes null for each
        if self._nonfinite is Nonfinite.NULL:
            return text
        tokens = _NONFINITE_TOKENS[self._nonfinite]
        special = values[places]
        is_nan = np.isnan(special)
        if is_nan.all():
            return memoryview(bytes(text).replace(b"null", tokens[0]))
        kinds = np.where(is_nan, 0, np.where(special > 0, 1, 2)).tolist()
        *pieces, last = bytes(text).split(b"null")
        written = zip(pieces, [tokens[kind] for kind in kinds], strict=True)
        return memoryview(b"".join((*chain.from_iterable(written), last)))

    def _dump(self, values: npt.NDArray[Any]) -> memoryview:
        # A view: the text between the brackets is three times as large as the values.
        return memoryview(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY))[1:-1]


_NONFINITE_TOKENS = {
    Nonfinite.LITERAL: (b"NaN", b"Infinity", b"-Infinity"),
    Nonfinite.STRING: (b'"NaN"', b'"Infinity"', b'"-Infinity"'),
}


class _BytesEncoder:
    """BYTES: each element is a uint32 length and that many bytes.

    The text of an element that is not whole yet is written as its bytes arrive, so that a large
    one is never held.
    """

    def __init__(self, label: str, bytes_encoding: BytesEncoding, message: ErrorVocabulary) -> None:
        self.count = 0
        self._label = label
        self._message = message
        self._bytes_as = bytes_encoding
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
        whole, position = split_elements(data, position)
        if whole:
            out.append(self._separator() + b",".join(self._encode_elements(whole)))
            self.count += len(whole)
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
            raise self._message.malformed(f"{self._label} ends inside an element")

    def _separator(self) -> bytes:
        return b"," if self.count else b""

    def _encode_elements(self, elements: list[bytes]) -> list[bytes]:
        if self._bytes_as is BytesEncoding.BASE64:
            return [b'"' + b'","'.join(map(_base64, elements)) + b'"']
        try:
            texts = list(map(bytes.decode, elements))
        except UnicodeDecodeError as error:
            index = self.count + elements.index(error.object)
            raise _not_utf8_error(self._label, index, self._message) from None
        return [orjson.dumps(texts)[1:-1]]

    def _begin_element(self, data: bytes) -> bytes:
        self._missing = read_length(data)
        base64 = self._bytes_as is BytesEncoding.BASE64
        self._element = (
            Base64ElementWriter()
            if base64
            else Utf8ElementWriter(self._label, self.count, self._message)
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


def _not_utf8_error(label: str, index: int, message: ErrorVocabulary) -> GatewayError:
    """Make the error for an element that JSON cannot hold as text."""
    return GatewayError(
        message.policy_violation,
        f"{label}: element {index} is not UTF-8 text, which JSON needs; "
        f"{message.instead_of_text}set the policy bytes: base64",
    )


class ElementWriter(Protocol):
    """Writes one element, between its quotes, while its bytes arrive."""

    def feed(self, data: bytes, last: bool) -> bytes:
        """Write the next bytes; ``last`` tells that they are the last."""


class Utf8ElementWriter:
    """Writes an element as text; raises GatewayError (406) where it is none."""

    def __init__(self, label: str, index: int, message: ErrorVocabulary = RESPONSE) -> None:
        self._label = label
        self._message = message
        self._index = index
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def feed(self, data: bytes, last: bool) -> bytes:
        """Write the next bytes."""
        try:
            text = self._decoder.decode(data, last)
        except UnicodeDecodeError:
            raise _not_utf8_error(self._label, self._index, self._message) from None
        return orjson.dumps(text)[1:-1]


class Base64ElementWriter:
    """Writes an element in base64."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes, last: bool) -> bytes:
        """Write the next bytes, as far as they make up whole groups of three."""
        data = self._partial + data
        whole = len(data) if last else len(data) - len(data) % 3
        self._partial = data[whole:]
        return binascii.b2a_base64(data[:whole], newline=False)
