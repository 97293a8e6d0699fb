"""Reads and writes ModelInferRequest: fully buffered messages, with raw or typed contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.codec.grpc.contents import Chunks
from gateway.codec.grpc.infer_message import MessageKind, MessageParts
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.wire import Buffer
from gateway.protocol.messages import InferRequest, InferRequestHead, InputTensor
from gateway.protocol.request_features import read_features
from gateway.protocol.tensors import MAX_TENSORS


class ReadRequest(NamedTuple):
    """A request as read; ``is_raw`` tells whether the response must have raw contents.

    Both names are empty if the message has none.
    """

    model: str
    version: str
    request: InferRequest
    is_raw: bool


def read_infer_request(data: Buffer, header_cap: int, tensor_cap: int = MAX_TENSORS) -> ReadRequest:
    """Read a whole ModelInferRequest; its raw contents become views of ``data``.

    ``header_cap`` limits the bytes beside data, ``tensor_cap`` the inputs and requested outputs.
    Raises GatewayError: 400 that names the tensor, or the byte that is no protobuf; 413.
    """
    target, request_id, tensors, is_raw = _REQUESTS.read(data, header_cap, tensor_cap)
    model, version, head = target
    return ReadRequest(model, version, InferRequest(head, request_id, tuple(tensors)), is_raw)


def _make_head(
    parts: MessageParts, sizes: Sequence[int | None]
) -> tuple[str, str, InferRequestHead]:
    """Return the model, its version, and the head of the request."""
    inputs = tuple(
        InputTensor(
            tensor.name,
            tensor.datatype,
            tensor.shape,
            size,
            parameters=tensor.parameters,
            unknown_fields=tensor.unknown_fields,
        )
        for tensor, size in zip(parts.tensors, sizes, strict=True)
    )
    outputs = tuple(parts.requested)
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


_REQUESTS = MessageKind(REQUEST, fields.RAW_INPUT_CONTENTS, _make_head)


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
    names = ((fields.MODEL_NAME, model), (fields.MODEL_VERSION, version), (fields.ID, request.id))
    return _REQUESTS.write(names, request.head, _data_by_tensor(request), raw)


def _data_by_tensor(request: InferRequest) -> Sequence[Sequence[Buffer]]:
    """Return the data of each tensor that is not in shared memory.

    A raw binary request has one tensor, and BYTES in two parts.
    """
    if len(request.head.inputs) == 1 and request.tensors:
        return [request.chunks]
    # Nothing is missing, so what has a size alone has no bytes.
    return [() if isinstance(part, int) else part for part in request.tensors]
