"""Reads and writes what ModelInferRequest and ModelInferResponse have in common.

Messages are fully buffered, with raw or typed contents. Their fields have the same numbers, but for
requested outputs and raw contents.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from gateway.codec.grpc.contents import (
    Chunks,
    HeaderBudget,
    TensorLabel,
    read_contents,
    write_contents,
)
from gateway.errors import GatewayError, shorten
from gateway.protocol.datatypes import DATATYPES, Datatype
from gateway.protocol.error_vocabulary import ErrorVocabulary
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.wire import (
    MAX_MESSAGE,
    Buffer,
    WireError,
    WireReader,
    bytes_field,
    varint,
    varint_field,
)
from gateway.protocol.json_errors import describe_value
from gateway.protocol.messages import (
    Fields,
    InferRequestHead,
    InferResponseHead,
    InputTensor,
    OutputTensor,
    RequestedOutput,
)
from gateway.protocol.request_header import read_datatype, read_shape
from gateway.protocol.tensors import MAX_RANK, element_count
from gateway.sizes import CACHED_DOCUMENTS, MAX_CACHED_DOCUMENT, QUOTED_NAME
from gateway.system.bounded_cache import BoundedCache

SHARED_MEMORY: Final = "shared_memory_region"

_MAX_COPY: Final = 4 * 1024
"""Bytes of a message that is copied so that it is read faster."""

Head = TypeVar("Head")


class MessageKind(Generic[Head]):
    """Requests or responses: ``make_head`` takes the parts, and the size of each tensor's data."""

    def __init__(
        self,
        words: ErrorVocabulary,
        raw_tag: int,
        make_head: Callable[[MessageParts, Sequence[int | None]], Head],
    ) -> None:
        self.words: Final = words
        self.raw_tag: Final = raw_tag
        self.make_head: Final = make_head
        self._heads: Final[BoundedCache[tuple[bytes, tuple[int, ...], int], Head]] = BoundedCache(
            CACHED_DOCUMENTS
        )
        """Heads by all but id and raw contents, which most messages of a model have in common."""

    def read(
        self, data: Buffer, header_cap: int, tensor_cap: int
    ) -> tuple[Head, str | None, list[Chunks], bool]:
        """Read a whole message; its raw contents become views of ``data``, or of a copy.

        Returns its head, its id, the data of its tensors but for those in shared memory, and
        whether contents are raw: without any data both forms look alike, and raw is what clients
        read in every case. ``header_cap`` limits the bytes beside data, ``tensor_cap`` the tensors
        and the requested outputs. Raises GatewayError: 400 or 502 that names the tensor, or the
        byte that is no protobuf; 413.
        """
        if len(data) <= _MAX_COPY:
            data = bytes(data)  # a byte of a view takes a call of the interpreter
        # The split counts all bytes beside data, and the parts count the same bytes anew.
        budget = HeaderBudget(header_cap, tensor_cap, self.words)
        try:
            message_id, raw, rest = _split(data, self.raw_tag, budget)
            if raw:
                head = self._read_raw(data, rest, tuple(map(len, raw)), budget)
                return head, message_id, [[view] for view in raw], True
            parts = MessageParts(data, rest, budget.unspent())
            found = _read_typed(parts.tensors, data, parts.budget)
        except WireError as error:
            raise self.words.invalid_protobuf(error) from None
        head = self.make_head(
            parts, [None if chunks is None else sum(map(len, chunks)) for chunks in found]
        )
        tensors = [chunks for chunks in found if chunks is not None]
        return head, message_id, tensors, not any(each.contents for each in parts.tensors)

    def read_start(self, data: Buffer, header_cap: int, tensor_cap: int) -> tuple[Head, str | None]:
        """Read a message up to its raw contents, which have the sizes that their shapes tell.

        Returns its head and its id. A tensor has no size if that is not known, or if it has typed
        contents. Raises GatewayError as above.
        """
        budget = HeaderBudget(header_cap, tensor_cap, self.words)
        try:
            message_id, _, ranges = _split(data, self.raw_tag, budget)
            rest = _joined(data, ranges)
            key = rest, (), tensor_cap  # no raw message has this one
            head = self._heads.get(key)
            if head is None:
                parts = MessageParts(rest, (0, len(rest)), budget.unspent())
                head = self._heads.put(key, self.make_head(parts, _fixed_sizes(parts.tensors)))
        except WireError as error:
            raise self.words.invalid_protobuf(error) from None
        return head, message_id

    def _read_raw(
        self, data: Buffer, ranges: array[int], sizes: tuple[int, ...], budget: HeaderBudget
    ) -> Head:
        """Read a head, or take it from the cache: its parts are ``ranges`` of the data."""
        if _size_of(ranges) > min(budget.cap, MAX_CACHED_DOCUMENT):
            return self._parse(data, ranges, sizes, budget)
        rest = _joined(data, ranges)
        key = rest, sizes, budget.tensor_cap
        head = self._heads.get(key)
        if head is not None:
            return head
        try:
            head = self._parse(rest, (0, len(rest)), sizes, budget)
        except WireError:  # its offset is that in the copy
            return self._parse(data, ranges, sizes, budget)
        return self._heads.put(key, head)

    def _parse(
        self, data: Buffer, ranges: Sequence[int], sizes: Sequence[int], budget: HeaderBudget
    ) -> Head:
        parts = MessageParts(data, ranges, budget.unspent())
        return self.make_head(parts, _check_raw(parts.tensors, sizes, self.words))

    def write(
        self,
        model: str | None,
        version: str | None,
        message_id: str | None,
        head: InferRequestHead | InferResponseHead,
        tensors: Sequence[Sequence[Buffer]],
        raw: bool,
    ) -> Chunks:
        """Write a message as chunks; data are not copied but for typed contents.

        Raises GatewayError for data or parameters that protobuf cannot carry, and for a message
        over protobuf's limit.
        """
        names = (
            (fields.MODEL_NAME, model),
            (fields.MODEL_VERSION, version),
            (fields.ID, message_id),
        )
        start = b"".join([bytes_field(tag, text.encode()) for tag, text in names if text])
        chunks: Chunks
        if raw:
            written: bytes | None = head.written.get(_WRITTEN)
            if written is None:
                written = head.written[_WRITTEN] = b"".join(_write_head(head, self.words))
            chunks = [start + written]
            for tensor in tensors:
                chunks += [varint_field(self.raw_tag, sum(map(len, tensor))), *tensor]
        else:
            chunks = [start, *_write_head(head, self.words, iter(tensors))]
        if sum(map(len, chunks)) > MAX_MESSAGE:
            raise GatewayError(
                self.words.too_large,
                f"{self.words.name} is larger than protobuf allows: {MAX_MESSAGE} bytes",
            )
        return chunks


def _split(
    data: Buffer, raw_tag: int, budget: HeaderBudget
) -> tuple[str | None, list[memoryview], array[int]]:
    """Cut a message into its id, its raw contents and the rest, which most calls have in common.

    The rest is the start and end of each part of it in the buffer. Raises WireError, and
    GatewayError for too many tensors or raw contents, or if all but data is more than the budget.
    """
    message_id: str | None = None
    raw: list[memoryview] = []
    # Plain numbers: a field of two bytes must not cost an object.
    rest = array("q")
    rest_from = tensors = 0
    reader = WireReader(data)
    while tag := reader.next_tag():
        if tag != raw_tag and tag != fields.ID:
            reader.skip(tag)
            if tag != fields.TENSORS:
                budget.spend(reader.position - reader.field_start)
                continue
            tensors += 1
            if tensors > budget.tensor_cap:
                raise budget.words.too_many_tensors(budget.tensor_cap)
            continue
        if reader.field_start > rest_from:
            rest.extend((rest_from, reader.field_start))
        if tag == raw_tag:
            if len(raw) >= budget.tensor_cap:
                raise budget.words.too_many_tensors(budget.tensor_cap)
            raw.append(reader.read_view())
        else:
            budget.spend(reader.size_ahead(tag))
            message_id = reader.read_text() or None
        rest_from = reader.position
    if reader.position > rest_from:
        rest.extend((rest_from, reader.position))
    return message_id, raw, rest


def _pairs(ranges: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each range."""
    return zip(ranges[::2], ranges[1::2], strict=True)


def _size_of(ranges: array[int]) -> int:
    """Return the bytes of all ranges."""
    size = 0
    for start, end in _pairs(ranges):
        size += end - start
    return size


def _joined(data: Buffer, ranges: array[int]) -> bytes:
    """Return the bytes of all ranges; mostly there is one."""
    if len(ranges) == 2:
        return bytes(data[ranges[0] : ranges[1]])
    return b"".join([data[start:end] for start, end in _pairs(ranges)])


class MessageParts:
    """Parses the parts of a message apart from its id and raw contents.

    ``ranges`` are the start and end of each part in the buffer. Raises WireError and GatewayError.
    """

    def __init__(self, data: Buffer, ranges: Sequence[int], budget: HeaderBudget) -> None:
        self.tensors: Final[list[ParsedTensor]] = []
        self.requested: Final[list[RequestedOutput]] = []
        self.model = ""
        self.version = ""
        self.parameters: Final[Fields] = {}
        self.unknown: Final = bytearray()
        self.budget: Final = budget
        for start, end in _pairs(ranges):
            reader = WireReader(data, start, end)
            while tag := reader.next_tag():
                if tag == fields.TENSORS:
                    tensor = reader.enter()
                    budget.spend(tensor.position - reader.field_start)
                    self.tensors.append(read_tensor(tensor, len(self.tensors), budget))
                else:
                    budget.spend(reader.size_ahead(tag))
                    self._read_field(reader, tag)

    def _read_field(self, reader: WireReader, tag: int) -> None:
        """Read a field that is no tensor."""
        if tag == fields.MODEL_NAME:
            self.model = reader.read_text()
        elif tag == fields.MODEL_VERSION:
            self.version = reader.read_text()
        elif tag == fields.PARAMETERS:
            _read_parameter(reader, self.parameters)
        elif tag == fields.REQUESTED_OUTPUTS:  # of a request: a response has raw contents there
            cap, words = self.budget.tensor_cap, self.budget.words
            if len(self.requested) >= cap:
                raise words.malformed(
                    f"the request asks for more than {cap} outputs{words.tensor_limit}"
                )
            self.requested.append(read_requested_output(reader.enter()))
        else:
            self.unknown.extend(reader.skip_raw(tag))


def read_requested_output(reader: WireReader) -> RequestedOutput:
    """Read an output that a request lists; raises WireError."""
    name = ""
    parameters: Fields = {}
    unknown = bytearray()
    while tag := reader.next_tag():
        if tag == fields.REQUESTED_NAME:
            name = reader.read_text()
        elif tag == fields.REQUESTED_PARAMETERS:
            _read_parameter(reader, parameters)
        else:
            unknown += reader.skip_raw(tag)
    parameters.pop("binary_data", None)  # describes the form over HTTP
    return RequestedOutput(name, parameters, unknown_fields=bytes(unknown))


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
    def in_shared_memory(self) -> bool:
        """Tell whether the message has no data of the tensor."""
        return SHARED_MEMORY in self.parameters


def read_tensor(reader: WireReader, index: int, budget: HeaderBudget) -> ParsedTensor:
    """Read an input or an output, number ``index`` of its message, without its data.

    Raises WireError, and GatewayError (400, 502) that names the tensor for an unknown datatype or
    an invalid shape.
    """
    name = datatype = ""
    shape: list[int] = []
    parameters: Fields = {}
    contents: array[int] = array("q")
    unknown = bytearray()
    while tag := reader.next_tag():
        if tag == fields.CONTENTS:
            size = reader.read_length()
            if size:
                contents.extend((reader.position, reader.position + size))
            reader.position += size
            budget.spend(reader.position - reader.field_start - size)
            continue
        size = reader.size_ahead(tag)
        budget.spend(size)
        if tag == fields.TENSOR_NAME:
            name = reader.read_text()
        elif tag == fields.DATATYPE:
            datatype = reader.read_text()
        elif tag in (fields.SHAPE, fields.UNPACKED_SHAPE):
            _read_dimensions(reader, tag, shape)
        elif tag == fields.TENSOR_PARAMETERS:
            _read_parameter(reader, parameters)
        else:
            unknown += reader.skip_raw(tag)
        if not size:
            budget.spend(reader.position - reader.field_start)
    words = budget.words
    label = words.label(name) if name else f"{words.tensors}[{index}]"
    label += words.part_suffix
    parameters.pop("binary_data_size", None)  # describes the binary form over HTTP
    known = DATATYPES.get(datatype)
    if known is None or len(shape) > MAX_RANK or (shape and min(shape) < 0):
        declared: Fields = {"datatype": datatype} if datatype else {}
        known = read_datatype(declared, label, words)  # either raises
        read_shape({"shape": shape}, label, words)
    return ParsedTensor(label, name, known, tuple(shape), parameters, contents, bytes(unknown))


def _read_dimensions(reader: WireReader, tag: int, shape: list[int]) -> None:
    if tag == fields.UNPACKED_SHAPE:
        shape.append(reader.read_int64())
        return
    packed = reader.enter()
    while packed.position < packed.end:
        shape.append(packed.read_int64())


# ------------------------------------------------------------------------------------- data


def _fixed_sizes(tensors: Sequence[ParsedTensor]) -> list[int | None]:
    """Return the size that each tensor's raw contents have by its shape; None if it has none."""
    sizes: list[int | None] = []
    for tensor in tensors:
        element = None if tensor.contents or tensor.in_shared_memory else tensor.datatype.size
        sizes.append(element and element_count(tensor.shape) * element)
    return sizes


def _check_raw(
    tensors: Sequence[ParsedTensor], sizes: Sequence[int], words: ErrorVocabulary
) -> list[int | None]:
    """Check the sizes of raw contents; return the size of each tensor's data.

    It is None for tensors in shared memory: they have no raw contents. Raises GatewayError (400,
    502) that names the tensor.
    """
    raw = f"raw_{words.tensor}_contents"
    with_data = [tensor for tensor in tensors if not tensor.in_shared_memory]
    for tensor in tensors:
        if tensor.contents:
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


def _read_typed(
    tensors: Sequence[ParsedTensor], data: Buffer, budget: HeaderBudget
) -> list[Chunks | None]:
    """Return each tensor's data as raw bytes from its typed contents.

    It is None for tensors in shared memory. Raises WireError and GatewayError (400, 502).
    """
    found: list[Chunks | None] = []
    for tensor in tensors:
        if not tensor.in_shared_memory:
            label = TensorLabel(tensor.label, tensor.datatype, tensor.shape, budget.words)
            found.append(read_contents(label, data, tensor.contents, budget))
            continue
        if tensor.contents:
            raise budget.words.malformed(
                f"{tensor.label} has contents and {SHARED_MEMORY}; send one of them"
            )
        found.append(None)
    return found


# ---------------------------------------------------------------------------------- writing

_WRITTEN: Final = "grpc"
"""The key of what was written of a head."""


def _write_head(
    head: InferRequestHead | InferResponseHead,
    words: ErrorVocabulary,
    data: Iterator[Sequence[Buffer]] | None = None,
) -> Chunks:
    """Write all but names, id and raw contents, with ``data`` as typed contents if given."""
    chunks: Chunks = [write_parameters(fields.PARAMETERS, head.parameters, words.name, words)]
    tensors: Sequence[InputTensor | OutputTensor] = ()
    tensors = head.inputs if isinstance(head, InferRequestHead) else head.outputs
    for tensor in tensors:
        typed = None if data is None or tensor.binary_size is None else next(data)
        chunks += _write_tensor(tensor, words, typed)
    if isinstance(head, InferRequestHead):
        chunks += [_write_requested_output(output, words) for output in head.outputs]
    return [*chunks, head.unknown_fields]


def _write_tensor(
    tensor: InputTensor | OutputTensor, words: ErrorVocabulary, data: Sequence[Buffer] | None
) -> Chunks:
    """Write a tensor; raises GatewayError for data or parameters that protobuf cannot carry."""
    label = words.label(tensor.name)
    shape = b"".join(map(varint, tensor.shape))
    head = b"".join(
        (
            bytes_field(fields.TENSOR_NAME, tensor.name.encode()),
            bytes_field(fields.DATATYPE, tensor.datatype.name.encode()),
            bytes_field(fields.SHAPE, shape) if shape else b"",
            write_parameters(fields.TENSOR_PARAMETERS, tensor.parameters, label, words),
        )
    )
    contents: Chunks = []
    if data is not None and any(map(len, data)):
        typed = TensorLabel(label, tensor.datatype, tensor.shape, words)
        contents = write_contents(typed, data)
        contents.insert(0, varint_field(fields.CONTENTS, sum(map(len, contents))))
    size = len(head) + sum(map(len, contents)) + len(tensor.unknown_fields)
    return [varint_field(fields.TENSORS, size) + head, *contents, tensor.unknown_fields]


def _write_requested_output(output: RequestedOutput, words: ErrorVocabulary) -> bytes:
    label = f"output '{output.name}'"
    entry = bytes_field(fields.REQUESTED_NAME, output.name.encode())
    entry += write_parameters(fields.REQUESTED_PARAMETERS, output.parameters, label, words)
    return bytes_field(fields.REQUESTED_OUTPUTS, entry + output.unknown_fields)


# ------------------------------------------------------------------------------- parameters

ParameterValue = bool | int | float | str | None
"""None is a parameter of which no value is set, or one of a type that is not known."""

_DOUBLE: Final = struct.Struct("<d")


def _read_parameter(reader: WireReader, parameters: Fields) -> None:
    """Read one entry of a map into ``parameters``; of two with the same key the last counts."""
    entry = reader.enter()
    key = ""
    value: ParameterValue = None
    while tag := entry.next_tag():
        if tag == fields.KEY:
            key = entry.read_text()
        elif tag == fields.VALUE:
            value = _read_value(entry.enter(), value)
        else:
            entry.skip(tag)
    parameters[key] = value


def _read_value(reader: WireReader, value: ParameterValue) -> ParameterValue:
    """Read a value: the last of its alternatives, or ``value`` without any."""
    while tag := reader.next_tag():
        if tag == fields.INT64_PARAM:
            value = reader.read_int64()
        elif tag == fields.STRING_PARAM:
            value = reader.read_text()
        elif tag == fields.BOOL_PARAM:
            value = reader.read_varint() != 0
        elif tag == fields.UINT64_PARAM:
            value = reader.read_varint()
        elif tag == fields.DOUBLE_PARAM:
            value = float(_DOUBLE.unpack(reader.read_fixed(8))[0])
        else:
            reader.skip(tag)
    return value


def write_parameters(tag: int, parameters: Fields, label: str, words: ErrorVocabulary) -> bytes:
    """Write a map of parameters as fields with a tag; ``label`` names whose they are.

    Raises GatewayError (400, 502) that names a parameter whose value protobuf cannot carry: an
    array or an object.
    """
    entries = []
    for key, value in parameters.items():
        code = _write_value(value)
        if code is None:
            raise words.malformed(
                f"{label}: parameter '{shorten(key, QUOTED_NAME)}' must be true, false, a string "
                f"or a number to be sent over gRPC, got {describe_value(value)}"
            )
        entry = bytes_field(fields.KEY, key.encode()) + bytes_field(fields.VALUE, code)
        entries.append(bytes_field(tag, entry))
    return b"".join(entries)


def _write_value(value: object) -> bytes | None:
    """Write an InferParameter; None if it cannot carry the value."""
    if value is None:
        return b""
    if isinstance(value, bool):
        return varint_field(fields.BOOL_PARAM, value)
    if isinstance(value, int):
        # Only Triton knows uint64_param, so smaller numbers are int64. Larger ones are floats
        # already: no reader has integers of more than 64 bits.
        tag = fields.INT64_PARAM if value < 2**63 else fields.UINT64_PARAM
        return varint_field(tag, value)
    if isinstance(value, str):
        return bytes_field(fields.STRING_PARAM, value.encode())
    if isinstance(value, float):
        return varint(fields.DOUBLE_PARAM) + _DOUBLE.pack(value)
    return None
