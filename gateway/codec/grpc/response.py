"""Reads and writes ModelInferResponse: fully buffered messages, with raw or typed contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.codec.grpc.contents import Chunks
from gateway.codec.grpc.infer_message import MessageKind, MessageParts
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.fields import TYPED_CONTENTS
from gateway.protocol.grpc.wire import Buffer
from gateway.protocol.messages import InferResponse, InferResponseHead, OutputTensor
from gateway.protocol.response_header import MAX_OUTPUTS


class ReadResponse(NamedTuple):
    """A response as read; ``tensors`` are the data of outputs in order, as InferResponse says."""

    response: InferResponse
    tensors: list[Chunks]


def read_infer_response(data: Buffer, header_cap: int) -> ReadResponse:
    """Read a whole ModelInferResponse; its raw contents become views of ``data``.

    ``header_cap`` limits the bytes beside data. Raises GatewayError (502) that names the tensor, or
    the byte that is no protobuf.
    """
    head, response_id, tensors, _ = _RESPONSES.read(data, header_cap, MAX_OUTPUTS)
    return ReadResponse(InferResponse(head, response_id), tensors)


def _make_head(parts: MessageParts, sizes: Sequence[int | None]) -> InferResponseHead:
    outputs = tuple(
        OutputTensor(
            tensor.name,
            tensor.datatype,
            tensor.shape,
            size,
            tensor.parameters,
            unknown_fields=tensor.unknown_fields,
        )
        for tensor, size in zip(parts.tensors, sizes, strict=True)
    )
    return InferResponseHead(
        outputs,
        parts.model or None,
        parts.version or None,
        parts.parameters,
        memory=parts.budget.memory(len(outputs)),
        unknown_fields=bytes(parts.unknown),
    )


_RESPONSES = MessageKind(RESPONSE, fields.RAW_OUTPUT_CONTENTS, _make_head)


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
    names = (
        (fields.MODEL_NAME, head.model),
        (fields.MODEL_VERSION, head.version),
        (fields.ID, response.id),
    )
    return _RESPONSES.write(names, head, tensors, raw or any(map(_is_raw_only, head.outputs)))


def _is_raw_only(tensor: OutputTensor) -> bool:
    """Tell whether a tensor has data that typed contents cannot carry."""
    return bool(tensor.binary_size) and tensor.datatype.name not in TYPED_CONTENTS
