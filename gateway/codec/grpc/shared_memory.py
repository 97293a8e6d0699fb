"""ModelInfer messages whose tensors a server finds in shared memory, and responses without outputs.

Parameters are appended to the tensors of a message, which is kept otherwise: byte for byte, with
what the gateway does not know. A message on the wire mostly has its raw contents at its end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from gateway.codec.grpc.contents import Chunks, HeaderBudget
from gateway.codec.grpc.infer import read_request_start
from gateway.codec.grpc.infer_message import ParsedTensor, read_tensor, write_parameters
from gateway.codec.v2.shared_memory import (
    Place,
    RequestData,
    SharedTensors,
    check_output_names,
    not_in_place,
)
from gateway.errors import GatewayError, bad_request, bad_response
from gateway.protocol.error_vocabulary import REQUEST, RESPONSE
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.wire import (
    Buffer,
    TruncatedError,
    WireError,
    WireReader,
    bytes_field,
    varint_field,
)
from gateway.protocol.messages import InferRequest
from gateway.protocol.response_header import MAX_OUTPUTS
from gateway.protocol.tensors import element_count
from gateway.sizes import MAX_SERVER_DOCUMENT

MAX_START: Final = 16 * 1024
"""Bytes of a message before its raw contents: more of them would take more than a time slice."""


class SharedMessage(SharedTensors):
    """The tensors of a ModelInferRequest; ``start`` is all of it but the raw contents.

    ``contents`` are its fields of these; None if the inputs are still to come.
    """

    def __init__(
        self,
        request: InferRequest,
        start: bytes,
        data: RequestData,
        contents: Sequence[Buffer] | None,
        output_sizes: Mapping[str, int],
    ) -> None:
        super().__init__(request, data, output_sizes)
        self._start: Final = start
        self._contents = contents

    def set_inputs(self, data: memoryview) -> None:
        """Set the inputs that were still to come: all of them, one after another."""
        self.data = [data]
        contents: Chunks = []
        for size in self._sizes:
            contents += (varint_field(fields.RAW_INPUT_CONTENTS, size), data[:size])
            data = data[size:]
        self._contents = contents

    def write(self, inputs: Place | None, outputs: Place | None) -> Chunks:
        """Write the message; tensors without a place are as in the client's."""
        chunks: Chunks = [self._write_start(inputs, outputs)]
        if inputs is None:
            assert self._contents is not None
            chunks += self._contents
        return chunks

    def _write_start(self, inputs: Place | None, outputs: Place | None) -> bytes:
        sizes = self.output_sizes.values()
        of_inputs = _write_places(fields.TENSOR_PARAMETERS, inputs, self._sizes)
        of_outputs = _write_places(fields.REQUESTED_PARAMETERS, outputs, sizes)
        start, written, position = self._start, bytearray(), 0
        reader = WireReader(start)
        while tag := reader.next_tag():
            added = b""
            if tag == fields.TENSORS:
                added = next(of_inputs, b"")
            elif tag == fields.REQUESTED_OUTPUTS:
                added = next(of_outputs, b"")
            if not added:
                reader.skip(tag)
                continue
            written += start[position : reader.field_start]
            written += bytes_field(tag, bytes(reader.read_view()) + added)
            position = reader.position
        written += start[position:]
        if not self._request.head.outputs:
            for name, added in zip(self.output_sizes, of_outputs, strict=False):
                entry = bytes_field(fields.REQUESTED_NAME, name.encode()) + added
                written += bytes_field(fields.REQUESTED_OUTPUTS, entry)
        return bytes(written)

    def read_response(self, message: Buffer, memory: memoryview) -> Chunks:
        """Return a ModelInferResponse as it is with raw contents; ``memory`` has the outputs.

        Raises GatewayError (502) for a response that does not have the outputs that were asked
        for; each may be smaller than its place.
        """
        kept, outputs = _read_without_contents(message)
        places = self._split_outputs(memory)
        check_output_names([output.name for output in outputs], places)
        for output in outputs:
            size = element_count(output.shape) * (output.datatype.size or 0)
            has_place = output.datatype.size and not output.contents and not output.in_shared_memory
            place = places[output.name]
            if not has_place or size > len(place):
                raise not_in_place(output.name)
            kept += (varint_field(fields.RAW_OUTPUT_CONTENTS, size), place[:size])
        return kept


def _write_places(tag: int, place: Place | None, sizes: Collection[int]) -> Iterator[bytes]:
    """Yield the parameters of each tensor; none without a place."""
    for parameters in () if place is None else place.parameters(sizes):
        yield write_parameters(tag, parameters, "", REQUEST)


def _read_without_contents(message: Buffer) -> tuple[Chunks, list[ParsedTensor]]:
    """Return the parts of a response beside its raw contents, which are empty, and its outputs."""
    kept: Chunks = []
    outputs: list[ParsedTensor] = []
    budget = HeaderBudget(MAX_SERVER_DOCUMENT, MAX_OUTPUTS, RESPONSE)
    reader = WireReader(message)
    position = 0
    try:
        while tag := reader.next_tag():
            if tag == fields.TENSORS:
                outputs.append(read_tensor(reader.enter(), len(outputs), budget))
            elif tag == fields.RAW_OUTPUT_CONTENTS:
                kept.append(message[position : reader.field_start])
                if reader.read_view():
                    raise bad_response("the server's response has outputs that it left in memory")
                position = reader.position
            else:
                reader.skip(tag)
    except WireError as error:
        raise RESPONSE.invalid_protobuf(error) from None
    return [*kept, message[position:]], outputs


# ------------------------------------------------------------------- requests as they arrive


def find_contents(start: bytes) -> int | None:
    """Return where the first raw contents begin in the start of a ModelInferRequest.

    None if they are not in it. Raises WireError.
    """
    reader = WireReader(start)
    try:
        while tag := reader.next_tag():
            if tag == fields.RAW_INPUT_CONTENTS:
                return reader.field_start
            reader.skip(tag)
    except TruncatedError:
        pass
    return None


def read_sharable(start: bytes, size: int, header_cap: int, tensor_cap: int) -> InferRequest | None:
    """Read a ModelInferRequest of ``size`` bytes from all that precedes its raw contents.

    None if it may not go through shared memory: for each input, it must have raw contents of a
    size that its shape tells, and nothing after them. Raises GatewayError if it is not valid.
    """
    request = read_request_start(start, header_cap, tensor_cap)
    sizes = [each.binary_size or 0 for each in request.head.inputs]
    if not sizes or not all(sizes):
        return None
    contents = sum(sizes) + sum(len(varint_field(fields.RAW_INPUT_CONTENTS, n)) for n in sizes)
    return request if len(start) + contents == size else None


class ContentsReader:
    """Finds the data in the raw contents of a request, which arrive in pieces.

    ``ending`` are the fields that must follow them.
    """

    def __init__(self, request: InferRequest, ending: bytes = b"") -> None:
        self._inputs: Final = iter(request.head.inputs)
        self._ending = ending
        self._prefix = b""
        """What precedes the data of the input, and is still to come."""
        self._size = 0
        """Bytes of these data that are still to come."""

    def feed(self, piece: memoryview) -> Iterator[memoryview]:
        """Yield the data in a piece, as views.

        Raises GatewayError (400) for contents of another size than the shape of the input, and for
        another ending.
        """
        while piece:
            if not self._size and not self._prefix:
                self._begin_input()
            if prefix := self._prefix:
                size = min(len(prefix), len(piece))
                if piece[:size] != prefix[:size]:
                    raise self._error()
                self._prefix = prefix[size:]
            else:
                size = min(self._size, len(piece))
                self._size -= size
                yield piece[:size]
            piece = piece[size:]

    def _begin_input(self) -> None:
        tensor = next(self._inputs, None)
        if tensor is None:
            self._prefix, self._ending = self._ending, b""
            if not self._prefix:
                raise self._error()
            return
        self._size = tensor.binary_size or 0
        self._prefix = varint_field(fields.RAW_INPUT_CONTENTS, self._size)

    def _error(self) -> GatewayError:
        return bad_request("raw_input_contents do not have the sizes that the inputs' shapes tell")
