"""One tensor whose shape is that of its nested JSON: its elements' bytes, and the shape."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from gateway.codec.elements.base64_elements import decode_base64
from gateway.codec.elements.bytes_elements import pack_elements, pack_strings
from gateway.codec.elements.decode import TensorDecoder
from gateway.codec.elements.fast_strings import fast_decode_elements
from gateway.codec.elements.rounding import has_ties
from gateway.codec.json.array_scanner import ElementRun, StringPart
from gateway.codec.json.structure_scan import count_objects_and_members, mask_strings
from gateway.errors import GatewayError, bad_request
from gateway.protocol.datatypes import Family
from gateway.protocol.json_errors import parse_json
from gateway.protocol.tensors import MAX_RANK, TensorSpec, element_count
from gateway.protocol.v1 import BASE64_KEY

_MARKS_AT_ONCE = 4096
"""Brackets and commas that are looked at together."""
_MAX_SMALL_CHUNKS = 1024
"""Chunks of which one is made where they are small: each takes some 40 bytes beside its own."""
_MERGED_BYTES = 256 * 1024
"""Bytes that so many small chunks have at most, all together."""

_TENSOR_OVERHEAD = 2000
"""Bytes of memory that a tensor takes beside its own."""
_CHUNK_OVERHEAD = 48
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

    def __init__(self, declared: TensorSpec, memory: MemoryCounter) -> None:
        self.declared = declared
        self.label = f"input '{declared.name}'"
        self.is_text = declared.datatype.family is Family.TEXT
        self.has_base64 = False
        """An element came in base64: it need be no text."""
        self._values = TensorDecoder(self.label, declared.datatype)
        self._shape = ShapeFinder(self.label)
        self._marks = bytearray()
        self._has_rows = False
        self._merged_chunks = 0
        self._merged_size = 0
        self._memory = memory
        self._counted_size = 0
        self._count_memory(_TENSOR_OVERHEAD)

    def _count_memory(self, others: int = 0) -> None:
        """Count what is held by now, and other bytes."""
        size = self.size + _CHUNK_OVERHEAD * len(self.chunks)
        self._memory.size += size - self._counted_size + others
        self._counted_size = size

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
        if self._has_rows:
            self.add_marks(b"]")
        self._shape.feed(bytes(self._marks))
        return self._shape.shape(self.count)

    def add_marks(self, marks: bytes) -> None:
        """Take brackets and commas around elements."""
        self._marks += marks
        if len(self._marks) >= _MARKS_AT_ONCE:
            self._shape.feed(bytes(self._marks))
            self._marks.clear()

    def begin_row(self) -> None:
        """Begin the next of several rows."""
        self.add_marks(b"," if self._has_rows else b"[")
        self._has_rows = True

    def feed(self, item: ElementRun | StringPart) -> None:
        """Take the next run of an array, or a piece of a long string in it."""
        self._values.feed(item)
        if isinstance(item, ElementRun):
            if not item.first:
                self.add_marks(b",")
            self.add_marks(structural_marks(item.text))
            self._merge_small_chunks()
        self._count_memory()

    def append_to_element(self, data: bytes) -> None:
        """Take the next bytes of a BYTES element that arrives in pieces."""
        self._values.append_to_element(data)
        self._count_memory()

    def end_element(self) -> None:
        """End the element that arrived in pieces."""
        self._values.end_element()
        self._values.count += 1
        self._merge_small_chunks()

    def _merge_small_chunks(self) -> None:
        """Make one of many small chunks; no element is open."""
        if len(self.chunks) - self._merged_chunks < _MAX_SMALL_CHUNKS:
            return
        if self.size - self._merged_size <= _MERGED_BYTES:
            self.chunks[self._merged_chunks :] = [b"".join(self.chunks[self._merged_chunks :])]
        self._merged_chunks, self._merged_size = len(self.chunks), self.size

    def convert_rows(self, rows: list[Any], may_tie: bool) -> ConvertedRows:
        """Convert parsed rows without taking them; the error need not be worded well.

        ``may_tie`` refuses (ValueError) numbers whose text decides what they are rounded to.
        """
        data = self._pack_scalars(rows, may_tie)
        if data is not None:
            return ConvertedRows([data], len(rows), b"," * (len(rows) - 1))
        if not self.is_text:
            return self._convert_as_text(rows, may_tie)
        try:
            return self._convert_as_text(rows, may_tie=False)
        except GatewayError:
            return self._flatten_rows(rows)  # some are in base64

    def convert_elements(self, text: bytes) -> ConvertedRows | None:
        """Convert text between the brackets of an array of BYTES; None where anything is wrong."""
        plain = fast_decode_elements(b"[%b]" % text)
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

    def append_elements(self, rows: ConvertedRows) -> None:
        """Take converted elements, or arrays of them."""
        self.add_marks(rows.marks)
        self._values.chunks += rows.chunks
        self._values.size += sum(map(len, rows.chunks))
        self._values.count += rows.count
        self._merge_small_chunks()
        self._count_memory()

    def _flatten_rows(self, rows: list[Any]) -> ConvertedRows:
        elements: list[bytes] = []
        marks = bytearray()
        for row in rows:
            marks += b","
            self._flatten(row, elements, marks)
        return ConvertedRows([pack_elements(elements)], len(elements), bytes(marks[1:]))

    def _convert_as_text(self, rows: list[Any], may_tie: bool) -> ConvertedRows:
        text = _dump(rows)
        values = TensorDecoder(self.label, self.declared.datatype)
        run = ElementRun(text, 1, 1, first=True)
        values.feed(run)
        if may_tie and values.has_ties(run):
            raise ValueError("the text of a number is needed")
        return ConvertedRows(values.chunks, values.count, structural_marks(text))

    def _pack_scalars(self, rows: list[Any], may_tie: bool) -> bytes | None:
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

    def append_rows(self, rows: ConvertedRows) -> None:
        """Take converted rows."""
        self.begin_row()
        self.append_elements(rows)

    def _flatten(self, value: Any, elements: list[bytes], marks: bytearray) -> None:
        if isinstance(value, list):
            for number, item in enumerate(value):
                marks += b"," if number else b"["
                self._flatten(item, elements, marks)
            marks += b"]" if value else b"[]"
            return
        elements.append(self._element_bytes(value))

    def _element_bytes(self, value: Any) -> bytes:
        if type(value) is str:
            return value.encode()
        if isinstance(value, dict) and value.keys() == {BASE64_KEY}:
            text = value[BASE64_KEY]
            if isinstance(text, str):
                self.has_base64 = True
                return decode_base64(text.encode())
        raise self.not_bytes_error()

    def not_bytes_error(self) -> GatewayError:
        """Make the error of an element that is no BYTES."""
        return bad_request(
            f"{self.label}: element {self.count} must be a string or "
            f'{{"{BASE64_KEY}": "..."}}, as BYTES needs'
        )


def _dump(rows: list[Any]) -> bytes:
    try:
        text = orjson.dumps(rows)
    except orjson.JSONEncodeError:
        text = b"null"
    if b"null" in text:
        # What orjson writes for NaN and the infinities, and it knows no integers beyond 64 bits;
        # the standard library writes all of them.
        text = json.dumps(rows).encode()
    return text[1:-1]


_Offsets = npt.NDArray[np.intp]

_NON_MARKS = bytes(set(range(256)) - set(b"[],"))
_IS_MARK = bytes(code in b"[]," for code in range(256))

_NUMPY_MIN_BYTES = 2 * 1024
"""Bytes of text from which on numpy takes less time."""


def structural_marks(text: bytes) -> bytes:
    """Give the brackets and commas of text that holds whole strings only, outside of those."""
    if len(text) >= _NUMPY_MIN_BYTES and b'"' in text:
        codes, inside = mask_strings(text)
        is_mark = np.frombuffer(text.translate(_IS_MARK), np.uint8) > inside
        return np.compress(is_mark, codes).tobytes()
    if b'"' in text:
        if b"\\" in text:
            # What is escaped is neither a quote nor a backslash. Pairs go first, from the left.
            text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        text = b"".join(text.split(b'"')[::2])
    return text.translate(None, _NON_MARKS)


class ShapeFinder:
    """Takes the brackets and commas of one array, of which the grammar is checked elsewhere.

    ``label`` names the tensor in errors. Arrays of the same depth must have the same length, and
    values stand in the deepest ones alone. An array of one element has the same marks as one of
    none; so the number of all elements has the last word.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._depth = 0
        self._commas = 0
        self._follows_opening = True
        self._lengths: dict[int, int] = {}
        """By depth, from 1, how many items the first array there has."""
        self._closed: dict[int, int] = {}
        """By depth, how many arrays have closed."""
        self._rank: int | None = None

    def feed(self, marks: bytes) -> None:
        """Take the next marks; raises GatewayError (400) where the arrays are ragged."""
        codes = np.frombuffer(marks, np.uint8)
        brackets = np.flatnonzero(codes != ord(","))
        if not brackets.size:
            self._commas += len(marks)
            return
        commas = np.diff(brackets, prepend=-1) - 1
        commas[0] += self._commas
        self._commas = len(marks) - int(brackets[-1]) - 1
        opening = codes[brackets] == ord("[")
        after_opening = np.concatenate(([self._follows_opening], opening[:-1]))
        self._follows_opening = bool(opening[-1])
        depths = self._depth + np.cumsum(np.where(opening, 1, -1))
        self._depth = int(depths[-1])
        depths += ~opening  # the depth of the array that opens or closes here
        self._check_values(commas, opening, after_opening, depths)
        self._check_lengths(opening, depths)

    def _check_values(
        self,
        commas: _Offsets,
        opening: npt.NDArray[np.bool_],
        after_opening: npt.NDArray[np.bool_],
        depths: _Offsets,
    ) -> None:
        """Check the arrays that hold no others, and that beside others there are no values."""
        innermost = after_opening & ~opening
        # Between two arrays there is one comma; before the first one and behind the last, none.
        beside = ~innermost & (commas != (~after_opening & opening))
        if beside.any():
            raise self._ragged_error("values stand beside arrays")
        if not innermost.any():
            return
        found = depths[innermost]
        if self._rank is None:
            self._rank = int(found[0])
        if (found != self._rank).any():
            raise self._ragged_error("some values are nested deeper than others")
        self._check_length(self._rank, commas[innermost] + 1)

    def _check_lengths(self, opening: npt.NDArray[np.bool_], depths: _Offsets) -> None:
        """Check the arrays that hold others."""
        if self._rank is None:
            return
        closing = np.flatnonzero(~opening)
        depths = depths[closing]
        within = closing[depths == self._rank]
        before = self._closed.get(self._rank, 0) - len(within)
        for depth in range(self._rank - 1, int(depths.min(initial=self._rank)) - 1, -1):
            places = closing[depths == depth]
            # How many arrays had closed within, by the time that each of these did.
            items = before + np.searchsorted(within, places)
            before = self._closed.get(depth, 0)
            if places.size:
                # The first of them has those since the last one that closed before.
                since = before * self._lengths.get(depth, 0)
                self._check_length(depth, np.diff(items, prepend=since))
            within = places

    def _check_length(self, depth: int, lengths: _Offsets) -> None:
        expected = self._lengths.setdefault(depth, int(lengths[0]))
        wrong = np.flatnonzero(lengths != expected)
        closed = self._closed.get(depth, 0)
        if wrong.size:
            number = closed + int(wrong[0])
            raise self._ragged_error(
                f"at depth {depth}, array number {number} has {lengths[wrong[0]]} items, "
                f"those before it {expected}"
            )
        self._closed[depth] = closed + lengths.size

    def shape(self, count: int) -> tuple[int, ...]:
        """Give the shape, once all arrays are closed, of ``count`` elements.

        Raises GatewayError (400) where they are ragged after all.
        """
        if self._rank is None:
            return ()
        if self._rank > MAX_RANK:
            raise bad_request(
                f"{self._label} has {self._rank} dimensions; at most {MAX_RANK} may be"
            )
        shape = [self._lengths[depth] for depth in range(1, self._rank + 1)]
        if not count and shape[-1] == 1:
            shape[-1] = 0
        if element_count(shape) != count:
            raise self._ragged_error("some of its arrays are empty")
        return tuple(shape)

    def _ragged_error(self, why: str) -> GatewayError:
        return bad_request(f"{self._label} is no tensor, as its arrays are ragged: {why}")
