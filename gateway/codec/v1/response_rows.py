"""The rows of several tensors, each row an object that has one of every tensor."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

import orjson

from gateway.codec.policies import Nonfinite
from gateway.codec.v1.nested_writer import (
    BracketWriter,
    BytesElementEncoder,
    EmptyTensorEncoder,
    NestedNumberEncoder,
)
from gateway.protocol.datatypes import Datatype
from gateway.protocol.tensors import element_count
from gateway.sizes import ENCODE_CHUNK

_MOST_ROWS = 1024
"""Rows likewise."""


class RowBuffer(Protocol):
    """Holds a tensor until its rows are written."""

    @property
    def held(self) -> int:
        """Give the bytes that are held."""

    @property
    def row_size(self) -> int:
        """Give about how many bytes a row has."""

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next bytes; raises GatewayError as NestedEncoder does."""

    def end(self) -> None:
        """Raise GatewayError (502) where the elements were not as many as the shape says."""

    def texts(self, first: int, last: int) -> list[bytes]:
        """Write the rows from ``first`` on, up to ``last``."""

    def pieces(self, number: int) -> Iterator[bytes]:
        """Write one row, piece by piece."""


class NumberRowBuffer:
    """Numbers and truth values, held in binary form."""

    def __init__(
        self, label: str, datatype: Datatype, shape: tuple[int, ...], nonfinite: Nonfinite
    ) -> None:
        self._label = label
        self._datatype = datatype
        self._count, self._shape = shape[0], shape[1:]
        self._nonfinite = nonfinite
        self._data = bytearray()
        self.row_size = element_count(self._shape) * (datatype.size or 1)

    @property
    def held(self) -> int:
        """Give the bytes that are held."""
        return len(self._data)

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        self._data += data

    def end(self) -> None:
        """Check the rows without elements; else the bytes were counted with the header."""
        if not self.row_size:
            EmptyTensorEncoder(self._label, (self._count, *self._shape)).end()

    def texts(self, first: int, last: int) -> list[bytes]:
        """Write rows."""
        if not self.row_size:
            return [EmptyTensorEncoder(self._label, self._shape).end()] * (last - first)
        writer = self._writer((last - first, *self._shape), first)
        data = memoryview(self._data)[first * self.row_size : last * self.row_size]
        text = (writer.feed(data) + writer.end())[1:-1]
        # What stands between two rows, and nowhere within one.
        depth = len(self._shape)
        opening, closing = b"[" * depth, b"]" * depth
        inner = text[depth : len(text) - depth].split(closing + b"," + opening)
        return [b"".join((opening, row, closing)) for row in inner]

    def pieces(self, number: int) -> Iterator[bytes]:
        """Write one row."""
        if not self.row_size:
            yield EmptyTensorEncoder(self._label, self._shape).end()
            return
        writer = self._writer(self._shape, number)
        end = (number + 1) * self.row_size
        for start in range(number * self.row_size, end, ENCODE_CHUNK):
            yield writer.feed(memoryview(self._data)[start : min(start + ENCODE_CHUNK, end)])
        yield writer.end()

    def _writer(self, shape: tuple[int, ...], row: int) -> NestedNumberEncoder:
        """Make the writer of rows from ``row`` on."""
        before = row * element_count(self._shape)
        return NestedNumberEncoder(self._label, self._datatype, shape, self._nonfinite, before)


class BytesRowBuffer(BytesElementEncoder):
    """BYTES, held as text: how many bytes a row has cannot be told before it is seen."""

    def __init__(self, label: str, shape: tuple[int, ...], as_base64: bool) -> None:
        super().__init__(label, shape, as_base64)
        self._text = bytearray()
        self._starts = array("Q")
        self._in_row = element_count(shape[1:])
        self._brackets = BracketWriter(shape[1:])

    @property
    def held(self) -> int:
        """Give the bytes that are held."""
        return len(self._text) + self._starts.itemsize * len(self._starts)

    @property
    def row_size(self) -> int:
        """Give about how many bytes a row has."""
        return len(self._text) // max(1, len(self._starts))

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        for part in self.parts(data):
            self._text += part

    def end(self) -> None:
        """Check that all elements have come."""
        self.check_ended()
        if not self._in_row:
            EmptyTensorEncoder(self._label, self._shape).end()
        self._text += self._brackets.end()

    def texts(self, first: int, last: int) -> list[bytes]:
        """Write rows."""
        return [b"".join(self.pieces(number)) for number in range(first, last)]

    def pieces(self, number: int) -> Iterator[bytes]:
        """Write one row."""
        if not self._in_row:
            yield EmptyTensorEncoder(self._label, self._shape[1:]).end()
            return
        behind = number + 1
        end = self._starts[behind] if behind < len(self._starts) else len(self._text)
        for start in range(self._starts[number], end, ENCODE_CHUNK):
            yield bytes(self._text[start : min(start + ENCODE_CHUNK, end)])

    def _lead(self) -> bytes:
        index = self.count % self._in_row
        if index:
            return self._brackets.lead(index, self._brackets.rank)
        # The brackets go to the row before, of which this is behind the end.
        self._text += self._brackets.end()
        self._starts.append(len(self._text))
        return self._brackets.lead(0, self._brackets.rank)


def write_rows(names: Sequence[str], tensors: Sequence[RowBuffer], count: int) -> Iterator[bytes]:
    """Write the rows of tensors as an array of objects, piece by piece."""
    keys = [
        (b"," if number else b"{") + orjson.dumps(name) + b":" for number, name in enumerate(names)
    ]
    largest = max(tensor.row_size for tensor in tensors)
    step = min(_MOST_ROWS, ENCODE_CHUNK // max(1, largest))
    yield b"["
    for first in range(0, count, max(1, step)):
        if first:
            yield b","
        if step > 1:
            yield _together(keys, tensors, first, min(first + step, count))
            continue
        for key, tensor in zip(keys, tensors, strict=True):
            yield key
            yield from tensor.pieces(first)
        yield b"}"
    yield b"]"


def _together(keys: Sequence[bytes], tensors: Sequence[RowBuffer], first: int, last: int) -> bytes:
    columns = [tensor.texts(first, last) for tensor in tensors]
    rows = []
    for row in zip(*columns, strict=True):
        parts = [part for pair in zip(keys, row, strict=True) for part in pair]
        rows.append(b"".join((*parts, b"}")))
    return b",".join(rows)
