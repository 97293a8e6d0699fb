"""Little-endian bytes of a tensor → nested JSON arrays of its shape, chunk by chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from binascii import b2a_base64
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from gateway.codec.elements.bytes_elements import PREFIX_SIZE, read_length, split_elements
from gateway.codec.elements.encode import (
    Base64ElementWriter,
    ElementWriter,
    NumberEncoder,
    TextChunk,
    Utf8ElementWriter,
)
from gateway.codec.policies import Nonfinite
from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.protocol.datatypes import Datatype
from gateway.protocol.tensors import element_count
from gateway.protocol.v1 import BASE64_KEY, V1_RESPONSE

MAX_NESTED_RANK = 32
"""Dimensions that a tensor has at most, to be written as arrays in each other."""

_MAX_EMPTY_ARRAYS = 64 * 1024
"""Arrays of no elements that a tensor without elements may consist of."""

_BASE64_OPENING, _BASE64_CLOSING = b'{"%b":"' % BASE64_KEY.encode(), b'"}'


class NestedEncoder(Protocol):
    """Takes the bytes of one tensor; gives the text of its arrays."""

    def feed(self, data: bytes | memoryview) -> bytes:
        """Convert the next bytes, as far as they make up whole elements.

        Raises GatewayError: 406 for a value that the policy refuses, 502 for broken elements.
        """

    def end(self) -> bytes:
        """Give the brackets that are still open.

        Raises GatewayError (502) where the elements were not as many as the shape says.
        """


class BracketWriter:
    """Gives the brackets and commas between elements of a shape, from the first to the last.

    A row of level 0 is the whole tensor, one of level 1 an item of it, and so on.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.rank = len(shape)
        self.sizes = tuple(element_count(shape[level:]) for level in range(self.rank))
        """How many elements a row of each level has."""
        self._levels: list[tuple[int, int]] = []
        """From the innermost on, the sizes of rows, and the highest level of which rows have it."""
        for level in range(self.rank - 1, 0, -1):
            if self._levels and self._levels[-1][0] == self.sizes[level]:
                self._levels.pop()
            self._levels.append((self.sizes[level], level))
        self._open = 0

    def level_at(self, index: int) -> int:
        """Give the highest level, from 1, of which a row begins at an element; else the rank."""
        # Rows are of at least two rows of the next size: mostly one look tells.
        found = self.rank
        for size, level in self._levels:
            if index % size:
                break
            found = level
        return found

    def lead(self, index: int, level: int) -> bytes:
        """Give what stands before a row of a level, or an element (the rank), at ``index``."""
        if not index:
            text = b"[" * level
        else:
            begins = self.level_at(index)
            text = b"]" * (self._open - begins) + b"," + b"[" * (level - begins)
        self._open = level
        return text

    def end(self) -> bytes:
        """Give the brackets behind the last one."""
        return b"]" * self._open


class EmptyTensorEncoder:
    """A tensor without elements."""

    def __init__(self, label: str, shape: tuple[int, ...]) -> None:
        self._label = label
        self._shape = shape

    def feed(self, data: bytes | memoryview) -> bytes:
        """Take the bytes, of which there must be none."""
        check_count(self._label, self._shape, len(data))
        return b""

    def end(self) -> bytes:
        """Write its arrays; raises GatewayError (406) where those are too many."""
        arrays = self._shape[: self._shape.index(0)]
        if element_count(arrays) > _MAX_EMPTY_ARRAYS:
            raise _not_nested_error(
                f"{self._label} holds more than {_MAX_EMPTY_ARRAYS} empty arrays"
            )
        text = b"[]"
        for size in reversed(arrays):
            text = b"[" + b",".join([text] * size) + b"]"
        return text


def check_rank(label: str, shape: tuple[int, ...]) -> None:
    """Raise GatewayError (406) for a shape that is not written as nested arrays."""
    if len(shape) > MAX_NESTED_RANK:
        raise _not_nested_error(
            f"{label} has {len(shape)} dimensions; at most {MAX_NESTED_RANK} are nested"
        )


def _not_nested_error(what: str) -> GatewayError:
    """Make the error for what a server may well answer, but V1's form is not good for."""
    return GatewayError(ErrorKind.NOT_ACCEPTABLE, f"{what}; ask for it the V2 way")


class NestedNumberEncoder(NumberEncoder):
    """Numbers and truth values of a shape that has elements.

    Whole rows are written together: numpy and orjson know how to nest them. They may be some of a
    tensor's rows, of which ``before`` is the number of elements that come before them.
    """

    def __init__(
        self,
        label: str,
        datatype: Datatype,
        shape: tuple[int, ...],
        nonfinite: Nonfinite,
        before: int = 0,
    ) -> None:
        super().__init__(label, datatype, nonfinite, V1_RESPONSE)
        self._shape = shape
        self._before = before
        self._brackets = BracketWriter(shape)
        self._block: tuple[int, ...] = (-1,)

    def end(self) -> bytes:
        """Give the brackets that are still open."""
        self.finish()
        check_count(self._label, self._shape, self.count)
        return self._brackets.end()

    def _encode_values(self, values: npt.NDArray[Any]) -> list[TextChunk]:
        parts: list[TextChunk] = []
        brackets, first = self._brackets, self.count
        while (left := first + values.size - self.count) > 0:
            level = self._find_level(left)
            size = self._choose_block(level, left)
            parts.append(brackets.lead(self.count, level))
            start = self.count - first
            parts.append(
                self._encode_checked(values[start : start + size], self._before + self.count)
            )
            self.count += size
        return parts

    def _find_level(self, left: int) -> int:
        """Give the highest level of which a whole row begins here; the rank where none does."""
        brackets = self._brackets
        for level in range(brackets.level_at(self.count), brackets.rank):
            if brackets.sizes[level] <= left:
                return level
        return brackets.rank

    def _choose_block(self, level: int, left: int) -> int:
        """Choose the elements that are written next: rows of a level, or a part of the last one."""
        brackets = self._brackets
        around = brackets.sizes[level - 1] if level else 1
        size = min(left, around - self.count % around)
        if level == brackets.rank:
            self._block = (-1,)
            return size
        rows = size // brackets.sizes[level]
        self._block = (rows, *self._shape[level:])
        return rows * brackets.sizes[level]

    def _dump(self, values: npt.NDArray[Any]) -> memoryview:
        return super()._dump(np.ascontiguousarray(values).reshape(self._block))


class BytesElementEncoder(ABC):
    """BYTES: writes each element while it arrives, so that a large one is never held.

    Elements are strings or, ``as_base64``, objects that hold them so.
    """

    def __init__(self, label: str, shape: tuple[int, ...], as_base64: bool) -> None:
        self.count = 0
        self._label = label
        self._shape = shape
        self._expected_count = element_count(shape)
        self._as_base64 = as_base64
        self._quotes = (_BASE64_OPENING, _BASE64_CLOSING) if as_base64 else (b'"', b'"')
        self._partial = b""
        self._open: ElementWriter | None = None
        self._missing = 0

    def parts(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Yield the text of the next bytes; raises GatewayError as NestedEncoder does."""
        data = self._partial + data
        self._partial = b""
        position = 0
        if self._open is not None:
            position = min(self._missing, len(data))
            yield from self._continue_element(self._open, data[:position])
        whole, position = split_elements(data, position)
        for element in whole:
            yield self._begin_next()
            yield b"".join((self._quotes[0], self._encode_element(element), self._quotes[1]))
        rest = data[position:]
        if self._open is None and len(rest) >= PREFIX_SIZE:
            yield self._begin_next()
            yield from self._begin(rest)
        else:
            self._partial = rest

    def check_ended(self) -> None:
        """Raise GatewayError (502) unless all elements have come."""
        if self._open is not None or self._partial:
            raise bad_response(f"{self._label} ends inside an element")
        check_count(self._label, self._shape, self.count)

    @abstractmethod
    def _lead(self) -> bytes:
        """Give what stands before the next element."""

    def _begin_next(self) -> bytes:
        if self.count == self._expected_count:
            check_count(self._label, self._shape, self.count + 1)
        lead = self._lead()
        self.count += 1
        return lead

    def _encode_element(self, element: bytes) -> bytes:
        """Write a whole element; most are small, and there may be very many of them."""
        if self._as_base64:
            return b2a_base64(element, newline=False)
        try:
            return orjson.dumps(element.decode())[1:-1]
        except UnicodeDecodeError:
            return self._make_element_writer().feed(element, last=True)

    def _make_element_writer(self) -> ElementWriter:
        """Make the writer of the element that was counted last."""
        if self._as_base64:
            return Base64ElementWriter()
        return Utf8ElementWriter(self._label, self.count - 1, V1_RESPONSE)

    def _begin(self, data: bytes) -> Iterator[bytes]:
        self._missing = read_length(data)
        self._open = self._make_element_writer()
        yield self._quotes[0]
        yield from self._continue_element(self._open, data[PREFIX_SIZE:])

    def _continue_element(self, element: ElementWriter, data: bytes) -> Iterator[bytes]:
        self._missing -= len(data)
        yield element.feed(data, last=not self._missing)
        if not self._missing:
            self._open = None
            yield self._quotes[1]


class NestedBytesEncoder(BytesElementEncoder):
    """BYTES of a shape that has elements."""

    def __init__(self, label: str, shape: tuple[int, ...], as_base64: bool) -> None:
        super().__init__(label, shape, as_base64)
        self._brackets = BracketWriter(shape)

    def feed(self, data: bytes | memoryview) -> bytes:
        """Convert the next bytes."""
        return b"".join(self.parts(data))

    def end(self) -> bytes:
        """Give the brackets that are still open."""
        self.check_ended()
        return self._brackets.end()

    def _lead(self) -> bytes:
        return self._brackets.lead(self.count, self._brackets.rank)


def check_count(label: str, shape: tuple[int, ...], count: int) -> None:
    """Raise GatewayError (502) unless a shape has so many elements."""
    if count != element_count(shape):
        raise bad_response(
            f"{label} of the server's answer holds {count} elements or more, its shape "
            f"{list(shape)} takes {element_count(shape)}"
        )
