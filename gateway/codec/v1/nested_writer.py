"""Encodes the binary form of a tensor as nested JSON arrays, chunk by chunk."""

from __future__ import annotations

from collections.abc import Generator
from functools import cached_property
from struct import pack

from gateway.codec import native
from gateway.codec.elements.bytes_elements import split_elements
from gateway.codec.elements.encode import BytesEncoder, NumberEncoder, TextChunk
from gateway.codec.policies import Nonfinite
from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.protocol.datatypes import Datatype, Family
from gateway.protocol.error_vocabulary import Tensor
from gateway.protocol.tensors import element_count
from gateway.protocol.v1 import V1_RESPONSE

MAX_NESTED_RANK = 32
"""The most dimensions of a tensor that is written as nested arrays."""

_MAX_EMPTY_ARRAYS = 64 * 1024
"""The most empty arrays that a tensor without elements may become."""

_MAX_UINT64 = 2**64 - 1


class BracketWriter:
    """Writes the brackets and commas between the elements of a shape, in order.

    The row of level 0 is the whole tensor, rows of level 1 are its items, and so on.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.rank = len(shape)
        self.sizes = tuple(element_count(shape[level:]) for level in range(self.rank))
        """The number of elements in a row of each level."""
        self._levels: list[tuple[int, int]] = []
        """Row sizes from the innermost level on, each with the highest level that has it."""
        for level in range(self.rank - 1, 0, -1):
            if self._levels and self._levels[-1][0] == self.sizes[level]:
                self._levels.pop()
            self._levels.append((self.sizes[level], level))
        self._open = 0

    @cached_property
    def packed_sizes(self) -> bytes:
        """Return ``sizes`` as encode_strings takes them."""
        # No tensor has so many elements that the largest size matters.
        return pack(f"<{self.rank}Q", *(min(size, _MAX_UINT64) for size in reversed(self.sizes)))

    def open_rows(self) -> None:
        """Take note that elements were written elsewhere, with the brackets before them."""
        self._open = self.rank

    def level_at(self, index: int) -> int:
        """Return the highest level, from 1, of which a row begins at an element; else the rank."""
        # Sizes at least double from one level to the next: mostly the first comparison decides.
        highest = self.rank
        for size, level in self._levels:
            if index % size:
                break
            highest = level
        return highest

    def lead(self, index: int, level: int) -> bytes:
        """Return the text before a row of a level, or before an element (level = rank)."""
        if not index:
            text = b"[" * level
        else:
            begins = self.level_at(index)
            text = b"]" * (self._open - begins) + b"," + b"[" * (level - begins)
        self._open = level
        return text

    def end(self) -> bytes:
        """Return the closing brackets."""
        return b"]" * self._open


def empty_arrays(label: str, shape: tuple[int, ...]) -> bytes:
    """Return the arrays of a tensor without elements; raises GatewayError (406) if too many."""
    arrays = shape[: shape.index(0)]
    if element_count(arrays) > _MAX_EMPTY_ARRAYS:
        raise _not_nested_error(f"{label} holds more than {_MAX_EMPTY_ARRAYS} empty arrays")
    text = b"[]"
    for size in reversed(arrays):
        text = b"[" + b",".join([text] * size) + b"]"
    return text


def check_rank(label: str, shape: tuple[int, ...]) -> None:
    """Raise GatewayError (406) for a shape with too many dimensions."""
    if len(shape) > MAX_NESTED_RANK:
        raise _not_nested_error(
            f"{label} has {len(shape)} dimensions; at most {MAX_NESTED_RANK} are nested"
        )


def _not_nested_error(what: str) -> GatewayError:
    """Make the error for a valid response that the V1 protocol cannot express."""
    return GatewayError(ErrorKind.NOT_ACCEPTABLE, f"{what}; request it with the V2 protocol")


class NestedNumberEncoder(NumberEncoder):
    """Encodes numbers and booleans of a shape.

    Complete rows are written together. For rows out of a larger tensor, ``before`` counts the
    elements before them.
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

    def end(self) -> bytes:
        """Return the closing brackets.

        Raises GatewayError (502) if the number of elements does not match the shape.
        """
        self.finish()
        check_count(self._label, self._shape, self.count)
        return self._brackets.end() if self.count else empty_arrays(self._label, self._shape)

    def feed(self, data: bytes | memoryview) -> bytes:
        """Encode the next bytes; see NumberEncoder."""
        complete = self._complete_elements(data)
        if complete and 0 in self._shape:
            check_count(self._label, self._shape, len(complete) // self._size)
        return b"".join(self._encode_rows(complete))

    def _encode_rows(self, data: bytes | memoryview) -> list[TextChunk]:
        parts: list[TextChunk] = []
        brackets, data = self._brackets, memoryview(data)
        while data:
            remaining = len(data) // self._size
            level = self._find_level(remaining)
            count, block = self._choose_block(level, remaining)
            parts.append(brackets.lead(self.count, level))
            size = count * self._size
            parts.append(self.encode(data[:size], self._before + self.count, block))
            self.count += count
            data = data[size:]
        return parts

    def _find_level(self, remaining: int) -> int:
        """Return the highest level of which a complete row begins here; else the rank."""
        brackets = self._brackets
        for level in range(brackets.level_at(self.count), brackets.rank):
            if brackets.sizes[level] <= remaining:
                return level
        return brackets.rank

    def _choose_block(self, level: int, remaining: int) -> tuple[int, tuple[int, ...]]:
        """Choose the next elements: complete rows of a level, or a part of the last one.

        Returns how many they are and, for complete rows, their shape.
        """
        brackets = self._brackets
        row_size = brackets.sizes[level - 1] if level else 1
        size = min(remaining, row_size - self.count % row_size)
        if level == brackets.rank:
            return size, ()
        rows = size // brackets.sizes[level]
        return rows * brackets.sizes[level], (rows, *self._shape[level:])


class BytesElementEncoder(BytesEncoder):
    """Encodes BYTES elements of a shape, as strings or, with ``as_base64``, as objects."""

    def __init__(self, label: str, shape: tuple[int, ...], as_base64: bool) -> None:
        form = native.BASE64_OBJECT if as_base64 else native.TEXT
        super().__init__(label, form, V1_RESPONSE)
        self._shape = shape
        self._expected_count = element_count(shape)

    def check_ended(self) -> None:
        """Raise GatewayError (502) unless all elements have come."""
        self.finish()
        check_count(self._label, self._shape, self.count)

    def _encode_complete(self, data: bytes, position: int) -> Generator[bytes, None, int]:
        complete, end = split_elements(data, position)
        for element in complete:
            yield self._begin_next()
            yield from self._encode_elements([element], self.count - 1)
        return end

    def _begin_next(self) -> bytes:
        self._check_more(1)
        return super()._begin_next()

    def _check_more(self, count: int) -> None:
        if self.count + count > self._expected_count:
            check_count(self._label, self._shape, self._expected_count + 1)


class NestedBytesEncoder(BytesElementEncoder):
    """Encodes BYTES of a shape."""

    def __init__(self, label: str, shape: tuple[int, ...], as_base64: bool) -> None:
        super().__init__(label, shape, as_base64)
        self._brackets = BracketWriter(shape)

    def _encode_complete(self, data: bytes, position: int) -> Generator[bytes, None, int]:
        rows, rest = self._brackets.packed_sizes, memoryview(data)[position:]
        encoded = None
        if self._expected_count:
            encoded = native.encode_strings(rest, self._form, self.count, rows)
        if encoded is None:
            return (yield from super()._encode_complete(data, position))
        count, size, text = encoded
        if count:
            self._check_more(count)
            self.count += count
            self._brackets.open_rows()
            yield text
        return position + size

    def end(self) -> bytes:
        """Return the closing brackets."""
        self.check_ended()
        return self._brackets.end() if self.count else empty_arrays(self._label, self._shape)

    def _lead(self) -> bytes:
        return self._brackets.lead(self.count, self._brackets.rank)


def check_count(label: str, shape: tuple[int, ...], count: int) -> None:
    """Raise GatewayError (502) unless ``count`` matches the shape."""
    if count != element_count(shape):
        raise bad_response(
            f"{label} of the server's response holds {count} elements or more, its shape "
            f"{list(shape)} takes {element_count(shape)}"
        )


NestedEncoder = NestedNumberEncoder | NestedBytesEncoder
"""Encodes the binary form of one tensor as nested arrays; ``end`` returns the closing brackets."""


def nested_encoder(
    label: str, tensor: Tensor, shape: tuple[int, ...], nonfinite: Nonfinite, as_base64: bool
) -> NestedEncoder:
    """Make the encoder of a tensor, in the shape that the client sees."""
    if tensor.datatype.family is Family.TEXT:
        return NestedBytesEncoder(label, shape, as_base64)
    return NestedNumberEncoder(label, tensor.datatype, shape, nonfinite)
