"""Reads nested JSON of V1 requests into tensors, and finds their shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from gateway.codec import native
from gateway.codec.elements.base64_elements import Base64Decoder
from gateway.codec.elements.decode import TensorDecoder
from gateway.codec.json.array_scanner import ArrayScanner, ElementRun, StringPart, find_string_cut
from gateway.codec.json.text_reader import WINDOW, JsonTextReader, PauseReason, Steps
from gateway.codec.native import plain
from gateway.errors import GatewayError, ModelMismatchError, bad_request
from gateway.protocol.datatypes import Family
from gateway.protocol.json_errors import quote_bytes
from gateway.protocol.tensors import MAX_RANK, TensorSpec, element_count
from gateway.protocol.v1 import BASE64_KEY
from gateway.sizes import CHUNK_OVERHEAD, LISTED_NAMES, QUOTED_NAME

_ELEMENTS_PER_SLICE = 64
"""Elements read one by one in a time slice."""
_ALL_REMAINING = 2**63
_ELEMENT_WINDOWS = (2 * 1024, 32 * 1024)
"""Bytes of elements converted together: most arrays end within the first size."""
_MEMBERS_PER_SLICE = 16
"""Members of an object read in a time slice."""
_MARKS_AT_ONCE = 4096
"""Brackets and commas processed together."""
_MAX_SMALL_CHUNKS = 1024
"""So many small chunks are merged into one: each takes some 40 bytes beside its content."""
_MERGED_BYTES = 256 * 1024
"""Chunks are small if so many have at most this size together."""

_TENSOR_OVERHEAD = 2000
"""Bytes of memory of a tensor beside its data."""


def read_members(
    text: JsonTextReader,
    tensors: Mapping[str, NestedTensorBuilder],
    where: str,
    in_rows: bool = False,
) -> Steps[None]:
    """Read an object that has a member for each tensor; with ``in_rows``, the next row of each.

    ``where`` names the object in errors. Raises GatewayError (400) for a member that is missing,
    duplicate or unknown.
    """
    named = set[str]()
    yield from text.expect(b"{", "an object")
    mark = yield from text.peek_byte()
    if mark == b"}":
        text.skip(1)
    while mark != b"}":
        name = yield from text.take_key()
        if name not in tensors:
            raise ModelMismatchError(
                f"{where} names '{name[:QUOTED_NAME]}', but the model takes {input_names(tensors)}"
            )
        if name in named:
            raise bad_request(f"{where} names '{name}' twice")
        named.add(name)
        if len(named) % _MEMBERS_PER_SLICE == 0:
            yield PauseReason.TIME_SLICE
        if in_rows:
            tensors[name].begin_row()
        yield from read_value(text, tensors[name])
        mark = yield from text.expect(b",}", "a comma or the end of the object")
    missing = [name for name in tensors if name not in named]
    if missing:
        raise ModelMismatchError(
            f"{where} lacks '{missing[0]}'; the model takes {input_names(tensors)}"
        )


def input_names(tensors: Mapping[str, NestedTensorBuilder]) -> str:
    """List the inputs of a model for an error."""
    return ", ".join(list(tensors)[:LISTED_NAMES]) + (
        ", ..." if len(tensors) > LISTED_NAMES else ""
    )


def read_value(text: JsonTextReader, tensor: NestedTensorBuilder) -> Steps[None]:
    """Read an array or a single element of a tensor.

    An array of BYTES is read in runs if its first window contains no object.
    """
    mark = yield from text.peek_byte()
    if mark == b"[":
        if tensor.is_text and b"{" in (yield from text.peek_window()):
            yield from _read_elements(text, tensor)
        else:
            yield from _read_array(text, tensor)
    elif tensor.is_text and mark in b'"{':
        yield from read_element(text, tensor)
    elif mark == b"{":
        raise ModelMismatchError(
            f"{tensor.label}: element {tensor.values.count} is an object, "
            f"{tensor.declared.datatype.name} needs {tensor.declared.datatype.family.value}"
        )
    else:
        raw = yield from (text.take_string() if mark == b'"' else text.take_scalar())
        tensor.feed(ElementRun(raw, 1, 1, first=True))


def _read_array(text: JsonTextReader, tensor: NestedTensorBuilder) -> Steps[None]:
    """Read an array of plain values in runs."""
    start = text.offset
    scanner = ArrayScanner(tensor.label, text.depth_cap)
    while True:
        yield from _feed_runs(scanner, text, tensor)
        if scanner.invalid_text is not None:
            raise bad_request(
                f"{tensor.label} is not an array of plain values, at byte "
                f"{start + scanner.invalid_at}, near: {quote_bytes(scanner.invalid_text)}"
            )
        text.put_back(*scanner.take_rest())
        if scanner.ended:
            return
        yield from text.wait_for_more()


def _feed_runs(
    scanner: ArrayScanner, text: JsonTextReader, tensor: NestedTensorBuilder
) -> Steps[None]:
    """Convert the runs at hand; this frame, and so the text, is gone while more is awaited."""
    for item in scanner.scan(*_taken(text)):
        tensor.feed(item)
        if tensor.is_text:
            yield PauseReason.TIME_SLICE


def _taken(text: JsonTextReader) -> tuple[bytes, bool, int]:
    buffer, at = text.take_all()
    return buffer, text.ended, at


def _read_elements(text: JsonTextReader, tensor: NestedTensorBuilder) -> Steps[None]:
    """Read an array of BYTES of which some are base64 objects."""
    depth = read = 0
    single_reads = 1
    while True:
        mark = yield from text.peek_byte()
        if not single_reads:
            single_reads = yield from _read_window(text, tensor, depth)
        if single_reads and mark == b"[":
            text.skip(1)
            tensor.add_marks(b"[")
            depth += 1
            if depth > text.depth_cap:
                raise bad_request(f"{tensor.label} is nested deeper than {text.depth_cap}")
            single_reads = 0 if single_reads == 1 else single_reads
            if (yield from text.peek_byte()) != b"]":
                continue
        elif single_reads:
            yield from read_element(text, tensor)
            single_reads -= 1
            read += 1
            if read % _ELEMENTS_PER_SLICE == 0:
                yield PauseReason.TIME_SLICE
        while (yield from text.expect(b",]", "a comma or the end of the array")) == b"]":
            tensor.add_marks(b"]")
            depth -= 1
            if not depth:
                return
        tensor.add_marks(b",")


def _read_window(text: JsonTextReader, tensor: NestedTensorBuilder, depth: int) -> Steps[int]:
    """Convert the elements of a window; return how many must be read one by one."""
    for size in _ELEMENT_WINDOWS:
        window = yield from text.peek_window(size)
        end, ends, max_depth = native.scan_array_values(window)
        if ends:
            break
    if not end:
        return 1
    # Reading one by one names what is invalid.
    rows = None if depth + max_depth > text.depth_cap else tensor.convert_elements(window[:end])
    if rows is None:
        return _ALL_REMAINING
    tensor.append_elements(rows)
    text.skip(end)
    yield PauseReason.TIME_SLICE
    return 0


def read_element(text: JsonTextReader, tensor: NestedTensorBuilder) -> Steps[None]:
    """Read one element of BYTES: a string or a base64 object."""
    mark = yield from text.peek_byte()
    if mark == b'"':
        yield from _read_string(text, tensor)
        return
    if mark != b"{":
        raise tensor.not_bytes_error()
    text.skip(1)
    if (yield from text.peek_byte()) != b'"' or (yield from text.take_key()) != BASE64_KEY:
        raise tensor.not_bytes_error()
    if (yield from text.peek_byte()) != b'"':
        raise tensor.not_bytes_error()
    tensor.has_base64 = True
    yield from _read_base64(text, tensor)
    if (yield from text.peek_byte()) != b"}":
        raise tensor.not_bytes_error()
    text.skip(1)
    tensor.end_element()


def _read_base64(text: JsonTextReader, tensor: NestedTensorBuilder) -> Steps[None]:
    text.skip(1)
    decoder = Base64Decoder()
    ended = False
    while not ended:
        piece, ended = yield from text.take_until(b'"')
        try:
            tensor.append_to_element(decoder.feed(piece, last=ended))
        except ValueError as error:
            raise bad_request(
                f"{tensor.label}: element {tensor.values.count} is not base64 ({error})"
            ) from None


def _read_string(text: JsonTextReader, tensor: NestedTensorBuilder) -> Steps[None]:
    whole = yield from text.take_short_string()
    if whole is None:
        text.skip(1)
        yield from _read_long_string(text, tensor)
        whole = b'""'
    tensor.feed(ElementRun(whole, 1, 1, first=True))


def _read_long_string(text: JsonTextReader, tensor: NestedTensorBuilder) -> Steps[None]:
    while True:
        window = yield from text.peek_window()
        cut = find_string_cut(window, len(window) == WINDOW, text.ended)
        if cut is None:
            yield from text.wait_for_more()
            continue
        end, closed = cut
        tensor.feed(StringPart(window[:end]))
        text.skip(end + closed)
        if closed:
            return


# --------------------------------------------------------------------------------- tensors


Rows = tuple[int, bytes, bytes]
"""The number of elements of some rows, their binary form, and the brackets and commas around."""


class MemoryCounter:
    """Counts the memory of several tensors, so that it need not be summed up."""

    def __init__(self) -> None:
        self.size = 0


class NestedTensorBuilder:
    """Builds a tensor from the runs of an array or from single elements.

    Its memory is added to ``memory``. Raises GatewayError (400) that names tensor, index and value
    of an element that is invalid for the datatype, or says how the arrays are ragged.
    """

    def __init__(self, declared: TensorSpec, memory: MemoryCounter) -> None:
        self.declared = declared
        self.label = f"input '{declared.name}'"
        self.is_text = declared.datatype.family is Family.TEXT
        self.has_base64 = False
        """Whether any element came as base64: then it may be no text."""
        self.values = TensorDecoder(self.label, declared.datatype)
        """The elements; ``end_element`` counts those that arrive in pieces."""
        self._shape = ShapeFinder(self.label)
        self._marks = bytearray()
        self._has_rows = False
        self._merged_chunks = 0
        self._merged_size = 0
        self._memory = memory
        self._counted_size = 0
        self._count_memory(_TENSOR_OVERHEAD)

    def _count_memory(self, others: int = 0) -> None:
        """Update the memory count, and add other bytes."""
        size = self.values.size + CHUNK_OVERHEAD * len(self.values.chunks)
        self._memory.size += size - self._counted_size + others
        self._counted_size = size

    def shape(self) -> tuple[int, ...]:
        """Return the shape, once all elements have come."""
        if self._has_rows:
            self.add_marks(b"]")
        self._shape.feed(bytes(self._marks))
        return self._shape.shape(self.values.count)

    def add_marks(self, marks: bytes) -> None:
        """Take the brackets and commas around elements."""
        self._marks += marks
        if len(self._marks) >= _MARKS_AT_ONCE:
            self._shape.feed(bytes(self._marks))
            self._marks.clear()

    def begin_row(self) -> None:
        """Begin the next row of several."""
        self.add_marks(b"," if self._has_rows else b"[")
        self._has_rows = True

    def feed(self, item: ElementRun | StringPart) -> None:
        """Take the next run of an array, or the next piece of a long string."""
        self.values.feed(item)
        if isinstance(item, ElementRun):
            if not item.first:
                self.add_marks(b",")
            self.add_marks(native.collect_marks(item.text))
            self._merge_small_chunks()
        self._count_memory()

    def append_to_element(self, data: bytes) -> None:
        """Take the next bytes of a BYTES element that arrives in pieces."""
        self.values.append_to_element(data)
        self._count_memory()

    def end_element(self) -> None:
        """End the element that arrived in pieces."""
        self.values.end_element()
        self.values.count += 1
        self._merge_small_chunks()

    def _merge_small_chunks(self) -> None:
        """Merge many small chunks into one; no element may be incomplete."""
        chunks, start = self.values.chunks, self._merged_chunks
        if len(chunks) - start < _MAX_SMALL_CHUNKS:
            return
        if self.values.size - self._merged_size <= _MERGED_BYTES:
            chunks[start:] = [b"".join(chunks[start:])]
        self._merged_chunks, self._merged_size = len(chunks), self.values.size

    def convert_rows(self, rows: list[Any], may_tie: bool) -> Rows:
        """Convert parsed rows without appending them; errors need no good wording.

        With ``may_tie``, raises ValueError for numbers whose text decides how they are rounded.
        """
        text = _dump(rows)
        if self.is_text:
            converted = self.convert_elements(text)
            if converted is None:
                raise ValueError("an element is invalid")
            return converted
        values = TensorDecoder(self.label, self.declared.datatype)
        run = ElementRun(text, 1, 1, first=True)
        values.feed(run)
        if may_tie and values.has_ties(run):
            raise ValueError("the text of a number is needed")
        return values.count, values.chunks[0], native.collect_marks(text)

    def convert_elements(self, text: bytes) -> Rows | None:
        """Convert text between the brackets of an array of BYTES; None if anything is invalid."""
        # C leaves escaped slashes, as PHP writes them in base64.
        decoded = native.decode_elements(text, 1, 1) or plain.decode_elements(text, 1, 1)
        if decoded is None:
            return None
        self.has_base64 |= decoded[3]
        return decoded[:3]

    def append_elements(self, rows: Rows) -> None:
        """Append converted elements, or arrays of them."""
        count, data, marks = rows
        self.add_marks(marks)
        self.values.chunks.append(data)
        self.values.size += len(data)
        self.values.count += count
        self._merge_small_chunks()
        self._count_memory()

    def not_bytes_error(self) -> GatewayError:
        """Make the error for an element that is not valid as BYTES."""
        return ModelMismatchError(
            f"{self.label}: element {self.values.count} must be a string or "
            f'{{"{BASE64_KEY}": "..."}}, as BYTES needs'
        )


def _dump(rows: list[Any]) -> bytes:
    try:
        text = orjson.dumps(rows)
    except orjson.JSONEncodeError:
        text = b"null"
    if b"null" in text:
        # orjson writes null for NaN and infinities, and has no integers beyond 64 bits. The
        # standard library writes all of them.
        text = json.dumps(rows).encode()
    return text[1:-1]


_Offsets = npt.NDArray[np.intp]


class ShapeFinder:
    """Finds the shape of one array from its brackets and commas; the grammar is checked elsewhere.

    ``label`` names the tensor in errors. Arrays of the same depth must have the same length, and
    only the deepest may contain values. An array of one element and an empty one have the same
    marks, so the number of all elements decides between them.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._depth = 0
        self._commas = 0
        self._follows_opening = True
        self._lengths: dict[int, int] = {}
        """By depth, from 1: the number of items of the first array there."""
        self._closed: dict[int, int] = {}
        """By depth: the number of arrays that have closed."""
        self._rank: int | None = None

    def feed(self, marks: bytes) -> None:
        """Take the next marks; raises GatewayError (400) if the arrays are ragged."""
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
        """Check the arrays without others in them; no values may stand beside arrays."""
        innermost = after_opening & ~opening
        # Between two arrays there is one comma; before the first and behind the last there is none.
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
        """Check the arrays that contain others."""
        if self._rank is None:
            return
        closing = np.flatnonzero(~opening)
        depths = depths[closing]
        within = closing[depths == self._rank]
        before = self._closed.get(self._rank, 0) - len(within)
        for depth in range(self._rank - 1, int(depths.min(initial=self._rank)) - 1, -1):
            places = closing[depths == depth]
            # How many inner arrays had closed by the time that each of these closed.
            items = before + np.searchsorted(within, places)
            before = self._closed.get(depth, 0)
            if places.size:
                # The first of them contains those since the last one that closed before.
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
        """Return the shape for ``count`` elements, once all arrays are closed.

        Raises GatewayError (400) if the arrays turn out to be ragged.
        """
        if self._rank is None:
            return ()
        if self._rank > MAX_RANK:
            raise bad_request(
                f"{self._label} has {self._rank} dimensions; at most {MAX_RANK} are allowed"
            )
        shape = [self._lengths[depth] for depth in range(1, self._rank + 1)]
        if not count and shape[-1] == 1:
            shape[-1] = 0
        if element_count(shape) != count:
            raise self._ragged_error("some of its arrays are empty")
        return tuple(shape)

    def _ragged_error(self, why: str) -> GatewayError:
        return bad_request(f"{self._label} is no tensor, as its arrays are ragged: {why}")
