"""Reads and writes ModelInferRequest, ModelInferResponse and ModelStreamInferResponse.

Messages are fully buffered, with raw or typed contents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

from gateway.codec.grpc.contents import TYPED_CONTENTS, Chunks
from gateway.codec.grpc.infer_message import MessageKind, MessageParts
from gateway.protocol.error_vocabulary import REQUEST, RESPONSE
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.wire import Buffer, WireError, WireReader, bytes_field, varint_field
from gateway.protocol.messages import (
    InferRequest,
    InferRequestHead,
    InferResponse,
    InferResponseHead,
    InputTensor,
    OutputTensor,
)
from gateway.protocol.request_features import read_features
from gateway.protocol.response_header import MAX_OUTPUTS
from gateway.protocol.tensors import MAX_TENSORS

_Tensor = TypeVar("_Tensor")


def _make_tensors(
    make: Callable[..., _Tensor], parts: MessageParts, sizes: Sequence[int | None]
) -> tuple[_Tensor, ...]:
    return tuple(
        make(
            tensor.name,
            tensor.datatype,
            tensor.shape,
            size,
            parameters=tensor.parameters,
            unknown_fields=tensor.unknown_fields,
        )
        for tensor, size in zip(parts.tensors, sizes, strict=True)
    )


# --------------------------------------------------------------------------------- requests


class ReadRequest(NamedTuple):
    """A request as read; ``is_raw`` tells whether the response must have raw contents.

    Both names are empty if the message has none.
    """

    model: str
    version: str
    request: InferRequest
    is_raw: bool


def read_infer_request(data: Buffer, header_cap: int, tensor_cap: int = MAX_TENSORS) -> ReadRequest:
    """Read a whole ModelInferRequest; its raw contents become views of ``data``, or of a copy.

    ``header_cap`` limits the bytes beside data, ``tensor_cap`` the inputs and requested outputs.
    Raises GatewayError: 400 that names the tensor, or the byte that is no protobuf; 413.
    """
    target, request_id, tensors, is_raw = _REQUESTS.read(data, header_cap, tensor_cap)
    model, version, head = target
    return ReadRequest(model, version, InferRequest(head, request_id, tuple(tensors)), is_raw)


def read_request_start(
    data: Buffer, header_cap: int, tensor_cap: int = MAX_TENSORS
) -> InferRequest:
    """Read a ModelInferRequest up to its raw contents, which are missing in the request.

    An input has no size if that does not follow from its shape. Raises GatewayError as above.
    """
    (_, _, head), request_id = _REQUESTS.read_start(data, header_cap, tensor_cap)
    sizes = tuple(each.binary_size for each in head.inputs if each.binary_size is not None)
    return InferRequest(head, request_id, sizes)


def _make_request_head(
    parts: MessageParts, sizes: Sequence[int | None]
) -> tuple[str, str, InferRequestHead]:
    """Return the model, its version, and the head of the request."""
    inputs, outputs = _make_tensors(InputTensor, parts, sizes), tuple(parts.requested)
    parts.parameters.pop("binary_data_output", None)  # describes the form over HTTP
    head = InferRequestHead(
        inputs,
        outputs,
        parts.parameters,
        features=read_features(parts.parameters, inputs, outputs),
        memory=parts.budget.memory(len(inputs) + len(outputs)),
        unknown_fields=bytes(parts.unknown),
    )
    return parts.model, parts.version, head


_REQUESTS: Final = MessageKind(REQUEST, fields.RAW_INPUT_CONTENTS, _make_request_head)


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
    return _REQUESTS.write(model, version, request.id, request.head, _data_by_tensor(request), raw)


def _data_by_tensor(request: InferRequest) -> Sequence[Sequence[Buffer]]:
    """Return the data of each tensor that is not in shared memory.

    A raw binary request has one tensor, and BYTES in two parts.
    """
    if len(request.head.inputs) == 1 and request.tensors:
        return [request.chunks]
    # Nothing is missing, so what has a size alone has no bytes.
    return [() if isinstance(part, int) else part for part in request.tensors]


# -------------------------------------------------------------------------------- responses


class ReadResponse(NamedTuple):
    """A response as read; ``tensors`` are the data of outputs in order, as InferResponse says."""

    response: InferResponse
    tensors: list[Chunks]


def read_infer_response(data: Buffer, header_cap: int) -> ReadResponse:
    """Read a whole ModelInferResponse; its raw contents become views of ``data``, or of a copy.

    ``header_cap`` limits the bytes beside data. Raises GatewayError (502) that names the tensor, or
    the byte that is no protobuf.
    """
    head, response_id, tensors, _ = _RESPONSES.read(data, header_cap, MAX_OUTPUTS)
    return ReadResponse(InferResponse(head, response_id), tensors)


def _make_response_head(parts: MessageParts, sizes: Sequence[int | None]) -> InferResponseHead:
    outputs = _make_tensors(OutputTensor, parts, sizes)
    return InferResponseHead(
        outputs,
        parts.model or None,
        parts.version or None,
        parts.parameters,
        memory=parts.budget.memory(len(outputs)),
        unknown_fields=bytes(parts.unknown),
    )


_RESPONSES: Final = MessageKind(RESPONSE, fields.RAW_OUTPUT_CONTENTS, _make_response_head)


def write_infer_response(
    response: InferResponse, tensors: Sequence[Sequence[Buffer]], raw: bool = True
) -> Chunks:
    """Write a fully buffered response as chunks of a ModelInferResponse; data are not copied.

    ``tensors`` are the data of all outputs but those in shared memory; none may be JSON text.
    Without ``raw`` the contents are typed, with copies of all but floats and booleans; they are raw
    nevertheless if an output is FP16 or BF16, as KServe does it.
    Raises GatewayError (502) that names a parameter, which protobuf cannot carry, or a tensor whose
    data are invalid.
    """
    assert not response.texts
    head = response.head
    is_raw = raw or any(map(_is_raw_only, head.outputs))
    return _RESPONSES.write(head.model, head.version, response.id, head, tensors, is_raw)


def _is_raw_only(tensor: OutputTensor) -> bool:
    """Tell whether a tensor has data that typed contents cannot carry."""
    return bool(tensor.binary_size) and tensor.datatype.name not in TYPED_CONTENTS


# ---------------------------------------------------------------------------------- streams

FINAL_RESPONSE: Final = "triton_final_response"
"""The parameter that tells whether a response is the last one of its request."""

_BARE_TAGS: Final = frozenset(
    (fields.ID, fields.PARAMETERS, fields.TENSORS, fields.RAW_OUTPUT_CONTENTS)
)
"""Fields of a ModelInferResponse that are not in a message around it."""


class StreamResponse(NamedTuple):
    """A message of a stream: a response, or the text of an error.

    ``has_begun`` tells of an error that the model has begun to serve its request.
    """

    error: str | None
    response: ReadResponse | None
    has_begun: bool = True


def read_stream_response(data: Buffer, header_cap: int) -> StreamResponse:
    """Read a message; its raw contents become views of ``data``, or of a copy.

    ``header_cap`` limits the bytes beside data. MLServer streams ModelInferResponse, without the
    message of the protocol around it. Raises GatewayError (502) for an invalid message.
    """
    error: str | None = None
    inner: memoryview | None = None
    try:
        reader = WireReader(data)
        while tag := reader.next_tag():
            if tag == fields.ERROR_MESSAGE:
                error = str(reader.read_view(), "utf-8", "replace")
            elif tag == fields.INFER_RESPONSE:
                inner = reader.read_view()
            elif tag in _BARE_TAGS:
                return StreamResponse(None, read_infer_response(data, header_cap))
            else:
                reader.skip(tag)
    except WireError as wire_error:
        raise RESPONSE.invalid_protobuf(wire_error) from None
    if error:
        return StreamResponse(error, None, bool(inner))
    return StreamResponse(None, read_infer_response(inner or b"", header_cap))


_IS_FINAL: Final = bytes_field(
    fields.PARAMETERS,
    bytes_field(fields.KEY, FINAL_RESPONSE.encode())
    + bytes_field(fields.VALUE, varint_field(fields.BOOL_PARAM, True)),
)


def write_stream_response(response: Chunks) -> Chunks:
    """Write a ModelInferResponse, the only one to its request, as a message of a stream."""
    size = len(_IS_FINAL) + sum(map(len, response))
    return [varint_field(fields.INFER_RESPONSE, size), *response, _IS_FINAL]


def write_stream_error(text: str, model: str, request_id: str | None) -> Chunks:
    """Write an error as a message of a stream; it tells which request failed."""
    request = bytes_field(fields.MODEL_NAME, model.encode())
    if request_id:
        request += bytes_field(fields.ID, request_id.encode())
    error = bytes_field(fields.ERROR_MESSAGE, text.encode(errors="replace"))
    return [error, bytes_field(fields.INFER_RESPONSE, request + _IS_FINAL)]
