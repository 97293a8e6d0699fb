"""Reads and writes what infer requests and responses have in common: tensors and their data."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gateway.codec.grpc.contents import Chunks, TensorLabel, read_contents, write_contents
from gateway.codec.grpc.header_budget import HeaderBudget
from gateway.codec.grpc.parameters import read_parameter, write_parameters
from gateway.errors import GatewayError
from gateway.protocol.datatypes import DATATYPES, Datatype
from gateway.protocol.error_vocabulary import ErrorVocabulary, Tensor
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.wire import (
    LENGTH,
    MAX_MESSAGE,
    Buffer,
    WireReader,
    bytes_field,
    length_prefix,
    varint,
)
from gateway.protocol.json_errors import quote_value
from gateway.protocol.messages import Fields
from gateway.protocol.tensors import MAX_RANK, element_count

SHARED_MEMORY = "shared_memory_region"

TENSORS_TAG = fields.INPUTS_TAG
"""Inputs of requests and outputs of responses have the same number."""
assert fields.INPUTS_TAG == fields.OUTPUTS_TAG


class SplitMessage:
    """A message cut into its id, its raw contents and the rest, which most calls have in common.

    ``rest`` are the start and end of each part of the rest in the buffer. Raises WireError, and
    GatewayError for more than ``tensor_cap`` tensors or raw contents, or if all else takes more
    than ``header_cap`` bytes.
    """

    def __init__(
        self,
        data: Buffer,
        raw_number: int,
        header_cap: int,
        tensor_cap: int,
        words: ErrorVocabulary,
    ) -> None:
        self.data = data
        self.id: str | None = None
        self.raw: list[memoryview] = []
        # Plain numbers: a field of two bytes must not cost an object.
        self.rest = array("q")
        raw_tag = raw_number << 3 | LENGTH
        rest_from = tensors = 0
        budget = HeaderBudget(header_cap, words)
        reader = WireReader(data)
        while tag := reader.next_tag():
            if tag != raw_tag and tag != fields.ID_TAG:
                reader.skip(tag)
                if tag != TENSORS_TAG:
                    budget.spend(reader.position - reader.field_start)
                    continue
                tensors += 1
                if tensors > tensor_cap:
                    raise words.too_many_tensors(tensor_cap)
                continue
            if reader.field_start > rest_from:
                self.rest.extend((rest_from, reader.field_start))
            if tag == raw_tag:
                if len(self.raw) >= tensor_cap:
                    raise words.too_many_tensors(tensor_cap)
                self.raw.append(reader.read_view())
            else:
                budget.spend(reader.size_ahead(tag))
                self.id = reader.read_text() or None
            rest_from = reader.position
        if reader.position > rest_from:
            self.rest.extend((rest_from, reader.position))

    @property
    def rest_size(self) -> int:
        """Return the bytes of the rest."""
        return sum(self.rest[1::2]) - sum(self.rest[::2])

    def join_rest(self) -> bytes:
        """Return a copy of the rest."""
        return b"".join(self.data[start:end] for start, end in pairs(self.rest))


def pairs(ranges: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each range."""
    return zip(ranges[::2], ranges[1::2], strict=True)


@dataclass(slots=True)
class ParsedTensor:
    """A tensor as its message has it; ``contents`` are the ranges of its typed contents."""

    label: str
    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    parameters: Fields
    contents: array[int]
    unknown_fields: bytes

    @property
    def has_contents(self) -> bool:
        """Tell whether there are typed contents."""
        return bool(self.contents)

    @property
    def in_shared_memory(self) -> bool:
        """Tell whether the message has no data of the tensor."""
        return SHARED_MEMORY in self.parameters


@dataclass(slots=True)
class _TensorFields:
    name: str = ""
    datatype: str = ""
    shape: list[int] = field(default_factory=list)
    rank: int = 0
    parameters: Fields = field(default_factory=dict)
    contents: array[int] = field(default_factory=lambda: array("q"))
    unknown: bytearray = field(default_factory=bytearray)

    def add_dimension(self, size: int) -> None:
        self.rank += 1
        if self.rank <= MAX_RANK:
            self.shape.append(size)


def read_tensor(
    reader: WireReader, index: int, budget: HeaderBudget, words: ErrorVocabulary
) -> ParsedTensor:
    """Read an input or an output, number ``index`` of its message, without its data.

    Raises WireError, and GatewayError (400, 502) that names the tensor for an unknown datatype or
    an invalid shape.
    """
    found = _TensorFields()
    while tag := reader.next_tag():
        if tag == fields.CONTENTS_TAG:
            size = reader.read_length()
            if size:
                found.contents.extend((reader.position, reader.position + size))
            reader.position += size
            budget.spend(reader.position - reader.field_start - size)
            continue
        size = reader.size_ahead(tag)
        budget.spend(size)
        _read_tensor_field(reader, tag, found)
        if not size:
            budget.spend(reader.position - reader.field_start)
    label = words.label(found.name) if found.name else f"{words.tensors}[{index}]"
    label += words.part_suffix
    found.parameters.pop("binary_data_size", None)  # describes the binary form over HTTP
    return ParsedTensor(
        label,
        found.name,
        _find_datatype(found.datatype, label, words),
        _check_shape(found, label, words),
        found.parameters,
        found.contents,
        bytes(found.unknown),
    )


def _read_tensor_field(reader: WireReader, tag: int, found: _TensorFields) -> None:
    if tag == fields.TENSOR_NAME_TAG:
        found.name = reader.read_text()
    elif tag == fields.DATATYPE_TAG:
        found.datatype = reader.read_text()
    elif tag == fields.PACKED_SHAPE_TAG:
        packed = reader.enter()
        while packed.position < packed.end:
            found.add_dimension(packed.read_int64())
    elif tag == fields.SHAPE_TAG:
        found.add_dimension(reader.read_int64())
    elif tag == fields.TENSOR_PARAMETERS_TAG:
        read_parameter(reader, found.parameters)
    else:
        found.unknown += reader.skip_raw(tag)


def _find_datatype(name: str, label: str, words: ErrorVocabulary) -> Datatype:
    if name in DATATYPES:
        return DATATYPES[name]
    if not name:
        raise words.malformed(f"{label}: datatype is missing")
    raise words.malformed(
        f"{label}: unknown datatype {quote_value(name)}; known are {', '.join(DATATYPES)}"
    )


def _check_shape(found: _TensorFields, label: str, words: ErrorVocabulary) -> tuple[int, ...]:
    if found.rank > MAX_RANK:
        raise words.malformed(
            f"{label}: shape has {found.rank} dimensions; at most {MAX_RANK} are allowed"
        )
    if found.shape and min(found.shape) < 0:
        raise words.malformed(
            f"{label}: shape {quote_value(found.shape)} must hold integers of 0 or more only"
        )
    return tuple(found.shape)


# ------------------------------------------------------------------------------------- data


def check_raw(
    tensors: Sequence[ParsedTensor], sizes: Sequence[int], words: ErrorVocabulary
) -> list[int | None]:
    """Check the sizes of raw contents; return the size of each tensor's data.

    It is None for tensors in shared memory: they have no raw contents. Raises GatewayError (400,
    502) that names the tensor.
    """
    raw = f"raw_{words.tensor}_contents"
    with_data = [tensor for tensor in tensors if not tensor.in_shared_memory]
    for tensor in tensors:
        if tensor.has_contents:
            raise words.malformed(f"{tensor.label} has contents beside {raw}; send one of them")
    if len(sizes) < len(with_data):
        raise words.malformed(
            f"{with_data[len(sizes)].label} has no {raw}: there are {len(sizes)} of them for "
            f"{len(with_data)} {words.tensors}"
        )
    if len(sizes) > len(with_data):
        last = f"; the last is {with_data[-1].label}" if with_data else ""
        raise words.malformed(
            f"{words.name} has {len(sizes)} {raw} for {len(with_data)} {words.tensors}{last}"
        )
    for tensor, size in zip(with_data, sizes, strict=True):
        _check_raw_size(tensor, size, words)
    remaining = iter(sizes)
    return [None if tensor.in_shared_memory else next(remaining) for tensor in tensors]


def _check_raw_size(tensor: ParsedTensor, size: int, words: ErrorVocabulary) -> None:
    count = element_count(tensor.shape)
    element = tensor.datatype.size
    # An element of BYTES takes at least its length; whoever converts them checks the rest.
    fits = size == count * element if element else size >= count * 4 and bool(count) == bool(size)
    if not fits:
        takes = f"{count * element} bytes" if element else f"{count} elements of 4 bytes or more"
        raise words.malformed(
            f"{tensor.label}: raw_{words.tensor}_contents has {size} bytes, but shape "
            f"{list(tensor.shape)} of {tensor.datatype.name} takes {takes}"
        )


def read_typed(
    tensors: Sequence[ParsedTensor], data: Buffer, budget: HeaderBudget, words: ErrorVocabulary
) -> list[Chunks | None]:
    """Return each tensor's data as raw bytes from its typed contents.

    It is None for tensors in shared memory. Raises WireError and GatewayError (400, 502).
    """
    found: list[Chunks | None] = []
    for tensor in tensors:
        if not tensor.in_shared_memory:
            label = TensorLabel(tensor.label, tensor.datatype, tensor.shape, words)
            found.append(read_contents(label, data, tensor.contents, budget))
            continue
        if tensor.has_contents:
            raise words.malformed(
                f"{tensor.label} has contents and {SHARED_MEMORY}; send one of them"
            )
        found.append(None)
    return found


# ---------------------------------------------------------------------------------- writing


def write_tensor(
    number: int,
    tensor: Tensor,
    parameters: Fields,
    unknown_fields: bytes,
    words: ErrorVocabulary,
    data: Sequence[Buffer] | None = None,
) -> Chunks:
    """Write a tensor as field ``number``, with ``data`` as typed contents if there are any.

    Raises GatewayError for data or parameters that protobuf cannot carry.
    """
    label = words.label(tensor.name)
    shape = b"".join(map(varint, tensor.shape))
    head = b"".join(
        (
            bytes_field(fields.TENSOR_NAME, tensor.name.encode()),
            bytes_field(fields.DATATYPE, tensor.datatype.name.encode()),
            bytes_field(fields.SHAPE, shape) if shape else b"",
            write_parameters(fields.TENSOR_PARAMETERS, parameters, label, words),
        )
    )
    contents: Chunks = []
    if data is not None and any(map(len, data)):
        typed = TensorLabel(label, tensor.datatype, tensor.shape, words)
        contents = write_contents(typed, data)
        contents.insert(0, length_prefix(fields.CONTENTS, sum(map(len, contents))))
    size = len(head) + sum(map(len, contents)) + len(unknown_fields)
    end: Chunks = [unknown_fields] if unknown_fields else []
    return [length_prefix(number, size) + head, *contents, *end]


def write_raw(number: int, data: Sequence[Buffer]) -> Chunks:
    """Write a tensor's data as an element of raw contents, field ``number``."""
    return [length_prefix(number, sum(map(len, data))), *data]


def check_size(chunks: Chunks, words: ErrorVocabulary) -> Chunks:
    """Return a message; raises GatewayError (413, 502) if it exceeds protobuf's limit."""
    if sum(map(len, chunks)) > MAX_MESSAGE:
        raise GatewayError(
            words.too_large, f"{words.name} is larger than protobuf allows: {MAX_MESSAGE} bytes"
        )
    return chunks
