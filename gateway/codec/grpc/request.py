"""Reads and writes ModelInferRequest: fully buffered messages, with raw or typed contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from gateway.codec.grpc.contents import Chunks
from gateway.codec.grpc.message_parts import MessageParts
from gateway.codec.grpc.parameters import read_parameter, write_parameters
from gateway.codec.grpc.tensors import (
    SplitMessage,
    check_raw,
    check_size,
    read_typed,
    write_raw,
    write_tensor,
)
from gateway.errors import bad_request
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.wire import Buffer, WireError, WireReader, bytes_field
from gateway.protocol.messages import (
    Fields,
    InferRequest,
    InferRequestHead,
    InputTensor,
    RequestedOutput,
    TensorData,
)
from gateway.protocol.request_features import read_features
from gateway.protocol.tensors import MAX_TENSORS
from gateway.sizes import CACHED_DOCUMENTS, MAX_CACHED_DOCUMENT
from gateway.system.bounded_cache import cached


class ReadRequest(NamedTuple):
    """A request as read; ``is_raw`` tells whether the response must have raw contents.

    Both names are empty if the message has none.
    """

    model: str
    version: str
    request: InferRequest
    is_raw: bool


class _Target(NamedTuple):
    model: str
    version: str
    head: InferRequestHead


def read_infer_request(data: Buffer, header_cap: int, tensor_cap: int = MAX_TENSORS) -> ReadRequest:
    """Read a whole ModelInferRequest; its raw contents become views of ``data``.

    ``header_cap`` limits the bytes beside data, ``tensor_cap`` the inputs and requested outputs.
    Raises GatewayError: 400 that names the tensor, or the byte that is no protobuf; 413.
    """
    try:
        message = SplitMessage(data, fields.RAW_INPUT_CONTENTS, header_cap, tensor_cap, REQUEST)
        if message.raw:
            target = _read_raw(message, header_cap, tensor_cap)
            tensors: list[TensorData] = [(view,) for view in message.raw]
            is_raw = True
        else:
            target, tensors, is_raw = _read_typed(message, header_cap, tensor_cap)
    except WireError as error:
        raise REQUEST.invalid_protobuf(error) from None
    request = InferRequest(target.head, message.id, tuple(tensors))
    return ReadRequest(target.model, target.version, request, is_raw)


def _read_raw(message: SplitMessage, header_cap: int, tensor_cap: int) -> _Target:
    sizes = tuple(map(len, message.raw))
    if message.rest_size <= min(header_cap, MAX_CACHED_DOCUMENT):
        try:
            return _read_cached(message.join_rest(), sizes, tensor_cap)
        except WireError:
            pass  # its offset is that in the copy
    parts = _RequestParts(message.data, message.rest, header_cap, tensor_cap)
    return parts.finish(check_raw(parts.tensors, sizes, REQUEST))


@cached(CACHED_DOCUMENTS)
def _read_cached(rest: bytes, sizes: tuple[int, ...], tensor_cap: int) -> _Target:
    """Read all but the id and the raw contents: most requests for a model have it in common."""
    parts = _RequestParts(rest, (0, len(rest)), len(rest), tensor_cap)
    return parts.finish(check_raw(parts.tensors, sizes, REQUEST))


def _read_typed(
    message: SplitMessage, header_cap: int, tensor_cap: int
) -> tuple[_Target, list[TensorData], bool]:
    parts = _RequestParts(message.data, message.rest, header_cap, tensor_cap)
    data = read_typed(parts.tensors, message.data, parts.budget, REQUEST)
    sizes = [None if chunks is None else sum(map(len, chunks)) for chunks in data]
    # Without any data both forms look alike; raw is what clients read in every case.
    is_raw = not any(tensor.has_contents for tensor in parts.tensors)
    return parts.finish(sizes), [chunks for chunks in data if chunks is not None], is_raw


class _RequestParts(MessageParts):
    """Parses the parts of a request: those of every message, and requested outputs."""

    def __init__(
        self, data: Buffer, ranges: Sequence[int], header_cap: int, tensor_cap: int
    ) -> None:
        self._outputs: Final[list[RequestedOutput]] = []
        self._tensor_cap: Final = tensor_cap
        super().__init__(data, ranges, header_cap, REQUEST)

    def finish(self, sizes: Sequence[int | None]) -> _Target:
        """Return the request, given the size of each input's data."""
        inputs = tuple(
            InputTensor(
                tensor.name,
                tensor.datatype,
                tensor.shape,
                size,
                parameters=tensor.parameters,
                unknown_fields=tensor.unknown_fields,
            )
            for tensor, size in zip(self.tensors, sizes, strict=True)
        )
        outputs = tuple(self._outputs)
        self.parameters.pop("binary_data_output", None)  # describes the form over HTTP
        head = InferRequestHead(
            inputs,
            outputs,
            self.parameters,
            features=read_features(self.parameters, inputs, outputs),
            memory=self.budget.memory(len(inputs) + len(outputs)),
            unknown_fields=bytes(self.unknown),
        )
        return _Target(self.model, self.version, head)

    def read_field(self, reader: WireReader, tag: int) -> None:
        """Read a field that is no input."""
        if tag != fields.REQUESTED_OUTPUTS_TAG:
            super().read_field(reader, tag)
            return
        if len(self._outputs) >= self._tensor_cap:
            raise bad_request(
                f"the request asks for more than {self._tensor_cap} outputs{REQUEST.tensor_limit}"
            )
        self._outputs.append(_read_requested_output(reader.enter()))


def _read_requested_output(reader: WireReader) -> RequestedOutput:
    name = ""
    parameters: Fields = {}
    unknown = bytearray()
    while tag := reader.next_tag():
        if tag == fields.REQUESTED_NAME_TAG:
            name = reader.read_text()
        elif tag == fields.REQUESTED_PARAMETERS_TAG:
            read_parameter(reader, parameters)
        else:
            unknown += reader.skip_raw(tag)
    parameters.pop("binary_data", None)  # describes the form over HTTP
    return RequestedOutput(name, parameters, unknown_fields=bytes(unknown))


# ---------------------------------------------------------------------------------- writing

_WRITTEN = "grpc"
"""The key of what was written of a head."""


def write_infer_request(
    request: InferRequest, model: str, version: str = "", raw: bool = True
) -> Chunks:
    """Write a fully buffered request as chunks of a ModelInferRequest; data are not copied.

    An empty ``version`` leaves the choice to the server.
    Typed contents, for servers that take no ``raw`` ones, have copies of all but floats and
    booleans. Members of JSON that the protocol does not know are left out.
    Raises GatewayError (400) that names a parameter, which protobuf cannot carry, or a tensor whose
    data are invalid; 501 for FP16 and BF16 in typed contents; 413.
    """
    assert not request.missing_size
    start = bytes_field(fields.MODEL_NAME, model.encode())
    if version:
        start += bytes_field(fields.MODEL_VERSION, version.encode())
    if request.id:
        start += bytes_field(fields.ID, request.id.encode())
    data = _data_by_tensor(request)
    chunks: Chunks
    if raw:
        chunks = [start + _write_head(request.head)]
        for tensor in data:
            chunks += write_raw(fields.RAW_INPUT_CONTENTS, tensor)
    else:
        chunks = [start, *_write_typed(request.head, data)]
    return check_size(chunks, REQUEST)


def _data_by_tensor(request: InferRequest) -> Sequence[Sequence[Buffer]]:
    """Return the data of each tensor that is not in shared memory.

    A raw binary request has one tensor, and BYTES in two parts.
    """
    if len(request.head.inputs) == 1 and request.tensors:
        return [request.chunks]
    # Nothing is missing, so what has a size alone has no bytes.
    return [() if isinstance(part, int) else part for part in request.tensors]


def _write_head(head: InferRequestHead) -> bytes:
    """Write all that requests with this head have in common, if their contents are raw."""
    text = head.written.get(_WRITTEN)
    if text is None:
        inputs = [chunk for tensor in head.inputs for chunk in _write_input(tensor, None)]
        text = b"".join((_write_parameters(head), *inputs, _write_end(head)))
        head.written[_WRITTEN] = text
    return text


def _write_typed(head: InferRequestHead, data: Sequence[Sequence[Buffer]]) -> Chunks:
    remaining = iter(data)
    chunks: Chunks = [_write_parameters(head)]
    for tensor in head.inputs:
        has_data = tensor.binary_size is not None
        chunks += _write_input(tensor, next(remaining) if has_data else None)
    return [*chunks, _write_end(head)]


def _write_input(tensor: InputTensor, data: Sequence[Buffer] | None) -> Chunks:
    return write_tensor(
        fields.INPUTS, tensor, tensor.parameters, tensor.unknown_fields, REQUEST, data
    )


def _write_parameters(head: InferRequestHead) -> bytes:
    return write_parameters(fields.PARAMETERS, head.parameters, REQUEST.name, REQUEST)


def _write_end(head: InferRequestHead) -> bytes:
    outputs = b"".join(map(_write_requested_output, head.outputs))
    return outputs + head.unknown_fields


def _write_requested_output(output: RequestedOutput) -> bytes:
    label = f"output '{output.name}'"
    entry = bytes_field(fields.REQUESTED_NAME, output.name.encode())
    entry += write_parameters(fields.REQUESTED_PARAMETERS, output.parameters, label, REQUEST)
    return bytes_field(fields.REQUESTED_OUTPUTS, entry + output.unknown_fields)
