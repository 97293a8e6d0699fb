"""Converts between typed contents and the raw bytes of a tensor."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gateway.codec.elements.bytes_elements import PREFIX_SIZE
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import Datatype, Family
from gateway.protocol.error_vocabulary import ErrorVocabulary
from gateway.protocol.grpc.wire import (
    FIXED32,
    FIXED64,
    LENGTH,
    MAX_VARINT_BYTES,
    VARINT,
    Buffer,
    WireError,
    WireReader,
    varint,
    varint_field,
)
from gateway.protocol.tensors import element_count
from gateway.sizes import CONVERT_CHUNK

Chunks = list[bytes | memoryview]

_PREFIX: Final = struct.Struct("<I")

_Values = npt.NDArray[np.uint64]

_BLOCK: Final = CONVERT_CHUNK
"""Bytes decoded, or elements encoded, at once: it bounds the memory of intermediate arrays."""

_MIN_VIEW: Final = 4 * 1024
"""Smaller pieces are copied together: a view costs 200 bytes, an empty element only 2."""

_PER_HEADER_BYTE: Final = 32
"""Memory of parsed parameters and names, for each byte of them in a message."""
_TENSOR_MEMORY: Final = 700
"""Memory of a tensor without name and parameters: most of it is that of two dictionaries."""


@dataclass(frozen=True, slots=True, eq=False)
class ContentsField:
    """A field of InferTensorContents, with the elements of some datatypes.

    ``dtype`` holds its elements, None for bool and bytes.
    """

    number: int
    name: str
    wire_type: int
    dtype: np.dtype[Any] | None
    datatypes: tuple[str, ...]


_FIELDS: Final = (
    ContentsField(1, "bool_contents", VARINT, None, ("BOOL",)),
    ContentsField(2, "int_contents", VARINT, np.dtype("<i4"), ("INT8", "INT16", "INT32")),
    ContentsField(3, "int64_contents", VARINT, np.dtype("<i8"), ("INT64",)),
    ContentsField(4, "uint_contents", VARINT, np.dtype("<u4"), ("UINT8", "UINT16", "UINT32")),
    ContentsField(5, "uint64_contents", VARINT, np.dtype("<u8"), ("UINT64",)),
    ContentsField(6, "fp32_contents", FIXED32, np.dtype("<f4"), ("FP32",)),
    ContentsField(7, "fp64_contents", FIXED64, np.dtype("<f8"), ("FP64",)),
    ContentsField(8, "bytes_contents", LENGTH, None, ("BYTES",)),
)
_FIELD_OF_NUMBER: Final = {field.number: field for field in _FIELDS}
TYPED_CONTENTS: Final = {name: field for field in _FIELDS for name in field.datatypes}
"""The field with the elements of each datatype. FP16 and BF16 have none: they travel raw only."""


class HeaderBudget:
    """Counts the bytes beside data: parsed, they take many times the memory, and time for each.

    Unknown fields and empty ones count too, wherever they are. ``tensor_cap`` limits the tensors,
    and the requested outputs.
    """

    def __init__(self, cap: int, tensor_cap: int, words: ErrorVocabulary) -> None:
        self.used = 0
        self.cap: Final = cap
        self.tensor_cap: Final = tensor_cap
        self.words: Final = words

    def spend(self, size: int) -> None:
        """Count bytes, before they are parsed; raises GatewayError (413, 502) above the cap."""
        self.used += size
        if self.used > self.cap:
            raise GatewayError(
                self.words.too_large,
                f"{self.words.name} has more than {self.cap} bytes beside the data of tensors "
                "(limits.max_inference_header_bytes)",
            )

    def unspent(self) -> HeaderBudget:
        """Return a budget with the same caps, of which nothing is spent."""
        return HeaderBudget(self.cap, self.tensor_cap, self.words)

    def memory(self, tensors: int) -> int:
        """Estimate the bytes of memory of what was parsed."""
        return _PER_HEADER_BYTE * self.used + _TENSOR_MEMORY * tensors


@dataclass(frozen=True, slots=True)
class TensorLabel:
    """What errors and checks need of a tensor; ``label`` names it in errors."""

    label: str
    datatype: Datatype
    shape: Sequence[int]
    words: ErrorVocabulary

    def error(self, text: str) -> GatewayError:
        """Make the error of a malformed message (400, 502)."""
        return self.words.malformed(f"{self.label}{text}")

    def check_count(self, count: int, where: str) -> None:
        """Raise GatewayError unless there are as many elements as the shape takes."""
        expected = element_count(self.shape)
        if count != expected:
            raise self.error(
                f": shape {list(self.shape)} takes {expected} elements, {where} {count}"
            )


class _Pieces:
    """Collects pieces of data, small ones in common chunks."""

    def __init__(self) -> None:
        self.chunks: Chunks = []
        self._small = bytearray()

    def add(self, piece: Buffer) -> None:
        if len(piece) < _MIN_VIEW:
            self._small += piece
        else:
            self._flush()
            self.chunks.append(piece)

    def add_element(self, prefix: bytes, data: memoryview) -> None:
        """Add an element of BYTES."""
        self._small += prefix
        if len(data) < _MIN_VIEW:
            self._small += data
        else:
            self.add(data)

    def finish(self) -> Chunks:
        self._flush()
        return self.chunks

    def _flush(self) -> None:
        if self._small:
            self.chunks.append(bytes(self._small))
            self._small = bytearray()


# ---------------------------------------------------------------------------------- reading


def read_contents(
    tensor: TensorLabel, data: Buffer, ranges: Sequence[int], budget: HeaderBudget
) -> Chunks:
    """Return the raw data of a tensor with typed contents.

    ``ranges`` are the start and end of each InferTensorContents in the buffer: protobuf has a field
    that occurs twice merged. Fields without elements are charged to ``budget``. Raises WireError,
    and GatewayError that names the tensor if elements are in the field of another datatype, do not
    fit the datatype, or do not match the shape.
    """
    field = TYPED_CONTENTS.get(tensor.datatype.name)
    pieces = _Pieces()
    count = 0
    for index in range(0, len(ranges), 2):
        reader = WireReader(data, ranges[index], ranges[index + 1])
        while tag := reader.next_tag():
            if field is None or tag >> 3 != field.number:
                _check_other_field(tensor, field, reader, tag)
            elif field.wire_type == LENGTH == tag & 7:
                view = reader.read_view()
                pieces.add_element(_PREFIX.pack(len(view)), view)
                count += 1
                continue
            elif tag & 7 == LENGTH:
                view = _read_packed(reader, field)
                pieces.add(view)
                if view:
                    continue
            elif tag & 7 == field.wire_type:
                start = reader.position
                reader.skip(tag)
                pieces.add(data[start : reader.position])
                continue
            else:
                reader.skip(tag)
            budget.spend(reader.position - reader.field_start)
    chunks = pieces.finish()
    if field is None:
        tensor.check_count(0, "and there are")
        return []
    if field.wire_type != LENGTH:
        count = sum(_count(chunk, field) for chunk in chunks)
    # Before anything is decoded: an element of 8 bytes may be one byte on the wire.
    tensor.check_count(count, f"{field.name} has")
    return _decode(tensor, field, chunks)


def _check_other_field(
    tensor: TensorLabel, field: ContentsField | None, reader: WireReader, tag: int
) -> None:
    """Skip a field that is not that of the datatype; raises GatewayError if it has elements."""
    start = reader.position
    reader.skip(tag)
    other = _FIELD_OF_NUMBER.get(tag >> 3)
    if other is None or tag & 7 not in (LENGTH, other.wire_type):
        return
    is_packed = tag & 7 == LENGTH and other.wire_type != LENGTH
    if is_packed and reader.position == start + 1:
        return  # of length 0
    raw = f"raw_{tensor.words.tensor}_contents"
    needed = f"{raw} only" if field is None else f"{field.name} or {raw}"
    raise tensor.error(
        f" has elements in {other.name}; those of {tensor.datatype.name} belong into {needed}"
    )


def _read_packed(reader: WireReader, field: ContentsField) -> memoryview:
    """Read the elements of a packed field, all of them complete."""
    view = reader.read_view()
    if field.wire_type == VARINT:
        if view and view[-1] >= 128:
            raise WireError("a varint that is cut short", reader.position - 1)
    elif len(view) % _fixed_size(field):
        raise WireError(f"{field.name} that ends within an element", reader.position)
    return view


def _fixed_size(field: ContentsField) -> int:
    return 4 if field.wire_type == FIXED32 else 8


def _count(data: Buffer, field: ContentsField) -> int:
    if field.wire_type == VARINT:
        return int(np.count_nonzero(np.frombuffer(data, np.int8) >= 0))
    return len(data) // _fixed_size(field)


def _decode(tensor: TensorLabel, field: ContentsField, chunks: Chunks) -> Chunks:
    """Return complete elements as raw data."""
    if field.wire_type != VARINT:
        return chunks
    try:
        if tensor.datatype.family is Family.BOOLEAN:
            return [part for chunk in chunks for part in _decode_booleans(chunk)]
        decoded: Chunks = []
        count = 0
        for chunk in chunks:
            for values in decode_varints(chunk):
                decoded.append(_to_datatype(tensor, field, values, count))
                count += values.size
    except WireError as error:
        # Its offset is that in a chunk of copied pieces.
        raise tensor.error(f": {field.name} has {error.reason}") from None
    return decoded


def _decode_booleans(data: Buffer) -> Chunks:
    """Return booleans as bytes of 0 and 1, which most often they are already."""
    if np.frombuffer(data, np.uint8).max(initial=0) <= 1:
        return [data]
    return [(values != 0).tobytes() for values in decode_varints(data)]


def _to_datatype(
    tensor: TensorLabel, field: ContentsField, values: npt.NDArray[np.uint64], first: int
) -> bytes:
    """Return integers in the datatype; raises GatewayError for the first that does not fit.

    ``first`` is the index of the first value in the tensor.
    """
    assert field.dtype is not None
    assert tensor.datatype.dtype is not None
    # The runtime drops upper bits of numbers that are too long for their field.
    numbers = values.astype(f"<u{field.dtype.itemsize}").view(field.dtype)
    if field.dtype == tensor.datatype.dtype:
        return numbers.tobytes()
    limits = tensor.datatype.integers
    assert limits is not None
    if numbers.min() < limits.least or numbers.max() > limits.most:
        at = int(np.argmax((numbers < limits.least) | (numbers > limits.most)))
        raise tensor.error(
            f": element {first + at} ({numbers[at]}) does not fit {tensor.datatype.name}"
        )
    return numbers.astype(tensor.datatype.dtype).tobytes()


# ---------------------------------------------------------------------------------- writing


def write_contents(tensor: TensorLabel, chunks: Sequence[Buffer]) -> Chunks:
    """Return an InferTensorContents with the raw data of a tensor, whose size is that of the shape.

    Raises GatewayError that names the tensor: 501 if its datatype travels raw only, 400 or 502 if
    the data are no elements.
    """
    field = TYPED_CONTENTS.get(tensor.datatype.name)
    if field is None:
        raise GatewayError(
            ErrorKind.UNSUPPORTED,
            f"{tensor.label} is {tensor.datatype.name}, which gRPC carries in "
            f"raw_{tensor.words.tensor}_contents only, and typed contents are needed",
        )
    if field.wire_type == LENGTH:
        return _write_elements(tensor, field, _join(chunks))
    content = [*chunks]
    if field.wire_type == VARINT:
        data = _join(chunks)
        if field.dtype is None:
            if np.frombuffer(data, np.uint8).max(initial=0) > 1:
                raise tensor.error(" is BOOL, but holds bytes other than 0 and 1")
            content = [data]
        else:
            values: npt.NDArray[Any] = np.frombuffer(data, tensor.datatype.dtype)
            content = [*encode_varints(values)]
    size = sum(map(len, content))
    return [varint_field(field.number << 3 | LENGTH, size), *content] if size else []


def _join(chunks: Sequence[Buffer]) -> Buffer:
    # Chunks may end within an element.
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _write_elements(tensor: TensorLabel, field: ContentsField, data: Buffer) -> Chunks:
    """Write the elements of a BYTES tensor."""
    pieces = _Pieces()
    tag = varint(field.number << 3 | LENGTH)
    view = memoryview(data)
    position = count = 0
    while position < len(view):
        start = position + PREFIX_SIZE
        if start > len(view):
            raise tensor.error(" ends inside an element")
        size = int(_PREFIX.unpack_from(view, position)[0])
        position = start + size
        if position > len(view):
            raise tensor.error(" ends inside an element")
        pieces.add_element(tag + varint(size), view[start:position])
        count += 1
    tensor.check_count(count, "data has")
    return pieces.finish()


# ---------------------------------------------------------------------------------- varints

_TOO_LONG: Final = f"a varint of more than {MAX_VARINT_BYTES} bytes"


def decode_varints(data: Buffer) -> Iterator[_Values]:
    """Yield packed varints in order, in blocks.

    Bits above the 64th are dropped, as the official runtime does. Raises WireError for a varint of
    more than 10 bytes, or one that is cut short.
    """
    codes = np.frombuffer(data, np.uint8)
    start = 0
    while start < codes.size:
        block = codes[start : start + _BLOCK]
        lasts = np.flatnonzero(block < 128)
        if not lasts.size:
            cut = "a varint that is cut short"
            raise WireError(cut if block.size < MAX_VARINT_BYTES else _TOO_LONG, start)
        size = int(lasts[-1]) + 1
        yield _decode_block(block[:size], lasts, start)
        start += size


def _decode_block(
    block: npt.NDArray[np.uint8], lasts: npt.NDArray[np.intp], offset: int
) -> _Values:
    """Decode complete varints; ``lasts`` are the indices of their last bytes."""
    if lasts.size == block.size:
        return block.astype(np.uint64)
    starts = np.empty_like(lasts)
    starts[0] = 0
    starts[1:] = lasts[:-1] + 1
    extra = lasts - starts
    longest = int(extra.max())
    if longest >= MAX_VARINT_BYTES:
        raise WireError(_TOO_LONG, offset + int(starts[np.argmax(extra >= MAX_VARINT_BYTES)]))
    bits = block & 127
    values: _Values = bits[starts].astype(np.uint64)
    # Numbers of one array are mostly of a few lengths, so there are few rounds.
    if int(extra.min()) == longest:
        for index in range(1, longest + 1):
            values |= bits[starts + index].astype(np.uint64) << np.uint64(7 * index)
        return values
    for index in range(1, longest + 1):
        longer = np.flatnonzero(extra >= index)
        part = bits[starts[longer] + index].astype(np.uint64)
        values[longer] |= part << np.uint64(7 * index)
    return values


def encode_varints(values: npt.NDArray[Any]) -> Iterator[bytes]:
    """Yield integers as packed varints, in blocks; negative ones take 10 bytes."""
    for start in range(0, values.size, _BLOCK):
        block = values[start : start + _BLOCK]
        if block.dtype.kind == "i":
            yield _encode_block(block.astype(np.int64).view(np.uint64))
        else:
            yield _encode_block(block.astype(np.uint64))


def _encode_block(values: _Values) -> bytes:
    most = int(values.max())
    if most < 128:
        return values.astype(np.uint8).tobytes()
    longest = -(-most.bit_length() // 7)
    sizes = np.ones(values.size, np.intp)
    for index in range(1, longest):
        sizes += values >= np.uint64(1 << 7 * index)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    codes = np.empty(int(ends[-1]), np.uint8)
    codes[starts] = (values & np.uint64(127)) | np.uint64(128)
    for index in range(1, longest):
        longer = np.flatnonzero(sizes > index)
        part = (values[longer] >> np.uint64(7 * index)) & np.uint64(127)
        codes[starts[longer] + index] = part | np.uint64(128)
    codes[ends - 1] &= 127
    return codes.tobytes()
