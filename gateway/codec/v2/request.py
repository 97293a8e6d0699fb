"""Converts infer requests: JSON ``data`` becomes binary tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import orjson

from gateway.codec.elements.decode import TensorDecoder
from gateway.codec.json.header_length_check import check_header_end
from gateway.codec.offload_interface import Offloader
from gateway.codec.policies import BytesEncoding
from gateway.codec.v2.json_reader import JsonMessageReader
from gateway.errors import GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.json_errors import ExtractedArray
from gateway.protocol.request_features import (
    RequestFeatures,
    may_hide_classification,
    read_features,
)
from gateway.protocol.request_header import (
    DataSource,
    Fields,
    InputTensor,
    OutputEncoding,
    has_base64_content,
    parse_request_header,
    read_inputs,
    read_output_encoding,
    request_binary_outputs,
    set_binary_size,
)
from gateway.protocol.tensors import MAX_TENSORS
from gateway.sizes import CACHED_DOCUMENTS

Body = tuple[Sequence[bytes] | int, ...]


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request for the server.

    ``tensors`` are the bytes behind the header, in order: buffered chunks, or the number of bytes
    to take from what follows the JSON in the client's body.
    """

    header: bytes
    tensors: Body
    output_encoding: OutputEncoding
    features: RequestFeatures
    input_encodings: Mapping[int, BytesEncoding] = field(default_factory=dict)
    """By input: how the client encoded BYTES in JSON."""

    @property
    def content_length(self) -> int:
        """Return the size of the whole body."""
        return len(self.header) + sum(map(_size, self.tensors))

    @property
    def expected_size(self) -> int:
        """Return the bytes that must follow the JSON in the client's body."""
        return sum(part for part in self.tensors if isinstance(part, int))


def _size(part: Sequence[bytes] | int) -> int:
    return part if isinstance(part, int) else sum(map(len, part))


class InferRequestConverter(JsonMessageReader):
    """Converts the JSON part of an infer request while it arrives, and buffers the tensors.

    ``header_cap`` is in bytes, ``depth_cap`` in levels of nesting. Numbers may be converted by the
    ``offloader``. ``tensor_cap`` limits the inputs, and the requested outputs.
    """

    def __init__(
        self,
        header_cap: int,
        depth_cap: int,
        offloader: Offloader | None = None,
        tensor_cap: int = MAX_TENSORS,
    ) -> None:
        super().__init__(REQUEST, header_cap, depth_cap, offloader, tensor_cap)
        self._depth_cap = depth_cap
        self._tensor_cap = tensor_cap
        self._inputs: tuple[InputTensor, ...] = ()

    def _make_sink(self, label: str, fields: Fields) -> TensorDecoder | None:
        datatype = fields.get("datatype")
        if has_base64_content(fields) and datatype != "BYTES":
            return None  # it is refused once all fields are known
        if isinstance(datatype, str) and datatype in DATATYPES:
            return TensorDecoder(label, DATATYPES[datatype])
        return None

    def _parse_header(
        self, text: bytes, cuts: Sequence[ExtractedArray]
    ) -> tuple[Fields, tuple[InputTensor, ...]]:
        try:
            fields = parse_request_header(text, self._depth_cap, cuts)
        except GatewayError:
            check_header_end(text, cuts)
            raise
        self._inputs = read_inputs(fields, self._tensor_cap)
        return fields, self._inputs

    def finish(self) -> InferRequest:
        """Return the request, once all text was fed with its end marked.

        Raises GatewayError (400) that names the tensor for anything wrong in the header.
        """
        header = self._finish_header()
        fields, inputs = header.fields, self._inputs
        entries = fields["inputs"]
        output_encoding = read_output_encoding(fields, self._tensor_cap)
        features = read_features(fields, inputs)
        converted = {
            array.index: self._checked_tensor(array, inputs[array.index]) for array in self._arrays
        }
        for index, tensor in converted.items():
            set_binary_size(entries[index], tensor.size)
        changed = request_binary_outputs(fields) or may_hide_classification(header.text)
        # Byte for byte if nothing had to change.
        text = orjson.dumps(fields) if changed or converted else header.text
        input_encodings = {
            index: BytesEncoding.BASE64 if inputs[index].base64 else BytesEncoding.UTF8
            for index in converted
        }
        return InferRequest(
            text, _body(inputs, converted), output_encoding, features, input_encodings
        )


MAX_CACHED_HEADER = 4 * 1024
"""The most bytes of JSON that ``header_without_data`` accepts."""


@lru_cache(maxsize=CACHED_DOCUMENTS)
def header_without_data(
    text: bytes, depth_cap: int, tensor_cap: int = MAX_TENSORS
) -> InferRequest | None:
    """Return the request of a JSON part that contains no data; None if it may contain some.

    Cached, as most binary requests have the header of one before. Raises GatewayError (400).
    """
    # Escapes could hide the key.
    if b'"data"' in text or b"\\" in text:
        return None
    codec = InferRequestConverter(len(text), depth_cap, tensor_cap=tensor_cap)
    codec.feed(text, last=True)
    return codec.finish()


def _body(inputs: tuple[InputTensor, ...], converted: dict[int, TensorDecoder]) -> Body:
    parts: list[Sequence[bytes] | int] = []
    for index, declared in enumerate(inputs):
        if declared.source is DataSource.DATA:
            parts.append(converted[index].chunks)
        elif declared.binary_size is not None:
            parts.append(declared.binary_size)
    return tuple(parts)
