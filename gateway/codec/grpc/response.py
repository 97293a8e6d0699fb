"""Reads and writes ModelInferResponse: fully buffered messages, with raw or typed contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.codec.grpc.contents import Chunks
from gateway.codec.grpc.message_parts import MessageParts
from gateway.codec.grpc.parameters import write_parameters
from gateway.codec.grpc.tensors import (
    SplitMessage,
    check_raw,
    check_size,
    read_typed,
    write_raw,
    write_tensor,
)
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.grpc import fields
from gateway.protocol.grpc.fields import TYPED_CONTENTS
from gateway.protocol.grpc.wire import Buffer, WireError, bytes_field
from gateway.protocol.messages import InferResponse, InferResponseHead, OutputTensor
from gateway.protocol.response_header import MAX_OUTPUTS
from gateway.sizes import CACHED_DOCUMENTS, MAX_CACHED_DOCUMENT
from gateway.system.bounded_cache import cached


class ReadResponse(NamedTuple):
    """A response as read; ``tensors`` are the data of outputs in order, as InferResponse says."""

    response: InferResponse
    tensors: list[Chunks]


def read_infer_response(data: Buffer, header_cap: int) -> ReadResponse:
    """Read a whole ModelInferResponse; its raw contents become views of ``data``.

    ``header_cap`` limits the bytes beside data. Raises GatewayError (502) that names the tensor, or
    the byte that is no protobuf.
    """
    try:
        message = SplitMessage(data, fields.RAW_OUTPUT_CONTENTS, header_cap, MAX_OUTPUTS, RESPONSE)
        if message.raw:
            head = _read_raw(message, header_cap)
            tensors: list[Chunks] = [[view] for view in message.raw]
        else:
            head, tensors = _read_typed(message, header_cap)
    except WireError as error:
        raise RESPONSE.invalid_protobuf(error) from None
    return ReadResponse(InferResponse(head, message.id), tensors)


def _read_raw(message: SplitMessage, header_cap: int) -> InferResponseHead:
    sizes = tuple(map(len, message.raw))
    if message.rest_size <= min(header_cap, MAX_CACHED_DOCUMENT):
        try:
            return _read_cached(message.join_rest(), sizes)
        except WireError:
            pass  # its offset is that in the copy
    parts = _ResponseParts(message.data, message.rest, header_cap)
    return parts.finish(check_raw(parts.tensors, sizes, RESPONSE))


@cached(CACHED_DOCUMENTS)
def _read_cached(rest: bytes, sizes: tuple[int, ...]) -> InferResponseHead:
    """Read all but the id and the raw contents: most responses of a model have it in common."""
    parts = _ResponseParts(rest, (0, len(rest)), len(rest))
    return parts.finish(check_raw(parts.tensors, sizes, RESPONSE))


def _read_typed(message: SplitMessage, header_cap: int) -> tuple[InferResponseHead, list[Chunks]]:
    parts = _ResponseParts(message.data, message.rest, header_cap)
    data = read_typed(parts.tensors, message.data, parts.budget, RESPONSE)
    sizes = [None if chunks is None else sum(map(len, chunks)) for chunks in data]
    return parts.finish(sizes), [chunks for chunks in data if chunks is not None]


class _ResponseParts(MessageParts):
    """Parses the parts of a response."""

    def __init__(self, data: Buffer, ranges: Sequence[int], header_cap: int) -> None:
        super().__init__(data, ranges, header_cap, RESPONSE)

    def finish(self, sizes: Sequence[int | None]) -> InferResponseHead:
        """Return the response, given the size of each output's data."""
        outputs = tuple(
            OutputTensor(
                tensor.name,
                tensor.datatype,
                tensor.shape,
                size,
                tensor.parameters,
                unknown_fields=tensor.unknown_fields,
            )
            for tensor, size in zip(self.tensors, sizes, strict=True)
        )
        return InferResponseHead(
            outputs,
            self.model or None,
            self.version or None,
            self.parameters,
            memory=self.budget.memory(len(outputs)),
            unknown_fields=bytes(self.unknown),
        )


# ---------------------------------------------------------------------------------- writing

_WRITTEN = "grpc"
"""The key of what was written of a head."""


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
    start = b"".join(
        bytes_field(number, text.encode())
        for number, text in (
            (fields.MODEL_NAME, head.model),
            (fields.MODEL_VERSION, head.version),
            (fields.ID, response.id),
        )
        if text
    )
    chunks: Chunks
    if raw or any(map(_is_raw_only, head.outputs)):
        chunks = [start + _write_head(head)]
        for tensor in tensors:
            chunks += write_raw(fields.RAW_OUTPUT_CONTENTS, tensor)
    else:
        chunks = [start, *_write_typed(head, tensors)]
    return check_size(chunks, RESPONSE)


def _is_raw_only(tensor: OutputTensor) -> bool:
    """Tell whether a tensor has data that typed contents cannot carry."""
    return bool(tensor.binary_size) and tensor.datatype.name not in TYPED_CONTENTS


def _write_head(head: InferResponseHead) -> bytes:
    """Write all that responses with this head have in common, if their contents are raw."""
    text = head.written.get(_WRITTEN)
    if text is None:
        outputs = [chunk for tensor in head.outputs for chunk in _write_output(tensor, None)]
        text = b"".join((_write_parameters(head), *outputs, head.unknown_fields))
        head.written[_WRITTEN] = text
    assert isinstance(text, bytes)
    return text


def _write_typed(head: InferResponseHead, tensors: Sequence[Sequence[Buffer]]) -> Chunks:
    remaining = iter(tensors)
    chunks: Chunks = [_write_parameters(head)]
    for tensor in head.outputs:
        has_data = tensor.binary_size is not None
        chunks += _write_output(tensor, next(remaining) if has_data else None)
    return [*chunks, head.unknown_fields]


def _write_output(tensor: OutputTensor, data: Sequence[Buffer] | None) -> Chunks:
    return write_tensor(
        fields.OUTPUTS, tensor, tensor.parameters, tensor.unknown_fields, RESPONSE, data
    )


def _write_parameters(head: InferResponseHead) -> bytes:
    return write_parameters(fields.PARAMETERS, head.parameters, RESPONSE.name, RESPONSE)
