"""One tensor whose shape is that of its nested JSON: its elements' bytes, and the shape."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from gateway.codec.elements.base64_text import decoded
from gateway.codec.elements.decode import TensorDecoder
from gateway.codec.elements.fast_strings import (
    pack_elements,
    pack_strings,
    plain_elements,
)
from gateway.codec.elements.rounding import has_ties
from gateway.codec.json.array_scanner import ElementRun, StringPart
from gateway.codec.json.value_walk import count_objects_and_members
from gateway.codec.v1.shapes import ShapeFinder, structural_marks
from gateway.errors import GatewayError, bad_request
from gateway.protocol.datatypes import Family
from gateway.protocol.json_errors import parse_json
from gateway.protocol.tensors import TensorSpec
from gateway.protocol.v1 import BASE64_KEY

_LENGTH = struct.Struct("<I")
_LONGEST_ELEMENT = 2**32 - 1

_MARKS = 4096
"""Brackets and commas that are looked at together."""
_LOOSE = 1024
"""Chunks of which one is made where they are small: each takes some 40 bytes beside its own."""
_SMALL = 256 * 1024
"""Bytes that so many small chunks have at most, all together."""

_OF_TENSOR = 2000
"""Bytes of memory that a tensor takes beside its own."""
_OF_CHUNK = 48
"""Likewise, a chunk."""


@dataclass(frozen=True, slots=True)
class ConvertedRows:
    """What some rows of a tensor come to."""

    chunks: list[bytes]
    count: int
    marks: bytes


class MemoryCounter:
    """Counts the bytes of memory that several tensors hold, so that they need not be summed up."""

    def __init__(self) -> None:
        self.size = 0


class NestedTensorBuilder:
    """Takes a tensor's JSON, as runs of an array or element by element; holds its bytes.

    What it holds is counted in ``held`` as well. Raises GatewayError (400) that names tensor, index
    and value of an element that is not of the datatype, or says how the arrays are ragged.
    """

    def __init__(self, declared: TensorSpec, held: MemoryCounter) -> None:
        self.declared = declared
        self.label = f"input '{declared.name}'"
        self.is_text = declared.datatype.family is Family.TEXT
        self.has_base64 = False
        """An element came in base64: it need be no text."""
        self._values = TensorDecoder(self.label, declared.datatype)
        self._shape = ShapeFinder(self.label)
        self._marks = bytearray()
        self._rows = False
        self._element: tuple[int, int] | None = None
        self._settled = 0
        self._settled_size = 0
        self._held = held
        self._counted = 0
        self._count_held(_OF_TENSOR)

    def _count_held(self, others: int = 0) -> None:
        """Count what is held by now, and other bytes."""
        size = self.size + _OF_CHUNK * len(self.chunks)
        self._held.size += size - self._counted + others
        self._counted = size

    @property
    def chunks(self) -> list[bytes]:
        """Give its bytes."""
        return self._values.chunks

    @property
    def size(self) -> int:
        """Give the number of its bytes."""
        return self._values.size

    @property
    def count(self) -> int:
        """Give the number of its elements."""
        return self._values.count

    def shape(self) -> tuple[int, ...]:
        """Give the shape of all that has come."""
        if self._rows:
            self.mark(b"]")
        self._shape.feed(bytes(self._marks))
        return self._shape.shape(self.count)

    def mark(self, marks: bytes) -> None:
        """Take brackets and commas around elements."""
        self._marks += marks
        if len(self._marks) >= _MARKS:
            self._shape.feed(bytes(self._marks))
            self._marks.clear()

    def begin_row(self) -> None:
        """Begin the next of several rows."""
        self.mark(b"," if self._rows else b"[")
        self._rows = True

    def feed(self, item: ElementRun | StringPart) -> None:
        """Take the next run of an array, or a piece of a long string in it."""
        self._values.feed(item)
        if isinstance(item, ElementRun):
            if not item.first:
                self.mark(b",")
            self.mark(structural_marks(item.text))
            self._settle()
        self._count_held()

    def open_element(self) -> None:
        """Begin an element of BYTES that comes in pieces."""
        self._element = (len(self.chunks), 0)
        self._hold(bytes(_LENGTH.size))

    def feed_element(self, piece: bytes) -> None:
        """Take the next piece of the element that is open."""
        assert self._element is not None
        place, length = self._element
        self._element = (place, length + len(piece))
        self._hold(piece)

    def close_element(self) -> None:
        """End the element that is open."""
        assert self._element is not None
        place, length = self._element
        if length > _LONGEST_ELEMENT:
            raise bad_request(f"{self.label}: element {self.count} is longer than 4 GiB")
        self.chunks[place] = _LENGTH.pack(length)
        self._element = None
        self._values.count += 1
        self._settle()

    def _settle(self) -> None:
        """Make one of many small chunks; no element is open."""
        if len(self.chunks) - self._settled < _LOOSE:
            return
        if self.size - self._settled_size <= _SMALL:
            self.chunks[self._settled :] = [b"".join(self.chunks[self._settled :])]
        self._settled, self._settled_size = len(self.chunks), self.size

    def _hold(self, data: bytes) -> None:
        self.chunks.append(data)
        self._values.size += len(data)
        self._count_held()

    def convert_rows(self, rows: list[Any], may_tie: bool) -> ConvertedRows:
        """Convert parsed rows without taking them; the error need not be worded well.

        ``may_tie`` refuses (ValueError) numbers whose text decides what they are rounded to.
        """
        data = self._packed(rows, may_tie)
        if data is not None:
            return ConvertedRows([data], len(rows), b"," * (len(rows) - 1))
        if not self.is_text:
            return self._by_text(rows, may_tie)
        try:
            return self._by_text(rows, may_tie=False)
        except GatewayError:
            return self._flattened(rows)  # some are in base64

    def convert_elements(self, text: bytes) -> ConvertedRows | None:
        """Convert text between the brackets of an array of BYTES; None where anything is wrong."""
        plain = plain_elements(b"[%b]" % text)
        if plain is not None:
            self.has_base64 |= plain.has_base64
            return ConvertedRows([plain.data], plain.count, plain.marks[1:-1])
        objects, members = count_objects_and_members(text)
        if objects != members:
            return None  # it is no element in base64, or a key of one comes twice
        try:
            return self.convert_rows(parse_json(b"[%b]" % text), may_tie=False)
        except (GatewayError, ValueError):
            return None

    def take_elements(self, rows: ConvertedRows) -> None:
        """Take converted elements, or arrays of them."""
        self.mark(rows.marks)
        self._values.chunks += rows.chunks
        self._values.size += sum(map(len, rows.chunks))
        self._values.count += rows.count
        self._settle()
        self._count_held()

    def _flattened(self, rows: list[Any]) -> ConvertedRows:
        elements: list[bytes] = []
        marks = bytearray()
        for row in rows:
            marks += b","
            self._flatten(row, elements, marks)
        return ConvertedRows([b"".join(elements)], len(elements) // 2, bytes(marks[1:]))

    def _by_text(self, rows: list[Any], may_tie: bool) -> ConvertedRows:
        text = _dumped(rows)
        values = TensorDecoder(self.label, self.declared.datatype)
        run = ElementRun(text, 1, 1, first=True)
        values.feed(run)
        if may_tie and values.has_ties(run):
            raise ValueError("the text of a number is needed")
        return ConvertedRows(values.chunks, values.count, structural_marks(text))

    def _packed(self, rows: list[Any], may_tie: bool) -> bytes | None:
        """Convert rows of one element each; None for others, and for what is not plain."""
        kinds = set(map(type, rows))
        if self.is_text:
            if kinds == {str}:
                return pack_strings(rows)
            if kinds <= {str, dict}:
                return pack_elements(list(map(self._element_bytes, rows)))
            return None
        datatype = self.declared.datatype
        code = datatype.struct_code
        is_float = datatype.family is Family.FLOAT
        is_plain = kinds == {int} or (is_float and kinds <= {int, float})
        if code is None or not is_plain:
            return None
        try:
            if may_tie and is_float and has_ties(np.array(rows, np.float64), datatype):
                return None
            return struct.pack(f"<{len(rows)}{code}", *rows)
        except (struct.error, OverflowError):
            return None  # what does not fit is named elsewhere

    def take_rows(self, rows: ConvertedRows) -> None:
        """Take converted rows."""
        self.begin_row()
        self.take_elements(rows)

    def _flatten(self, value: Any, elements: list[bytes], marks: bytearray) -> None:
        if isinstance(value, list):
            for number, item in enumerate(value):
                marks += b"," if number else b"["
                self._flatten(item, elements, marks)
            marks += b"]" if value else b"[]"
            return
        data = self._element_bytes(value)
        elements += (_LENGTH.pack(len(data)), data)

    def _element_bytes(self, value: Any) -> bytes:
        if type(value) is str:
            return value.encode()
        if isinstance(value, dict) and value.keys() == {BASE64_KEY}:
            text = value[BASE64_KEY]
            if isinstance(text, str):
                self.has_base64 = True
                return decoded(text.encode())
        raise self.not_text()

    def not_text(self) -> GatewayError:
        """Make the error of an element that is no BYTES."""
        return bad_request(
            f"{self.label}: element {self.count} must be a string or "
            f'{{"{BASE64_KEY}": "..."}}, as BYTES needs'
        )


def _dumped(rows: list[Any]) -> bytes:
    try:
        text = orjson.dumps(rows)
    except orjson.JSONEncodeError:
        text = b"null"
    if b"null" in text:
        # What orjson writes for NaN and the infinities, and it knows no integers beyond 64 bits;
        # the standard library writes all of them.
        text = json.dumps(rows).encode()
    return text[1:-1]
