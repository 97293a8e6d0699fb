"""Client form → upstream form: an infer request with its JSON ``data`` turned into binary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import orjson

from gateway.codec.elements.decode import TensorDecoder
from gateway.codec.json.header_length_check import check_header_end
from gateway.codec.offload import Offloader
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
    """A request as the server will get it.

    ``tensors`` are the bytes behind the header, in order: chunks held, or the number of bytes to
    take from what follows the JSON in the client's body.
    """

    header: bytes
    tensors: Body
    answer: OutputEncoding
    features: RequestFeatures
    input_encodings: Mapping[int, BytesEncoding] = field(default_factory=dict)
    """How the client wrote the elements of inputs in JSON, by their index, if they are BYTES."""

    @property
    def content_length(self) -> int:
        """Give the bytes of the whole body."""
        return len(self.header) + sum(map(_size, self.tensors))

    @property
    def expected_size(self) -> int:
        """Give the bytes that must follow the JSON in the client's body."""
        return sum(part for part in self.tensors if isinstance(part, int))


def _size(part: Sequence[bytes] | int) -> int:
    return part if isinstance(part, int) else sum(map(len, part))


class InferRequestConverter(JsonMessageReader):
    """Converts the JSON part of an infer request as it arrives, and holds the data in binary form.

    ``header_cap`` is in bytes, ``depth_cap`` in levels of nesting; ``lender`` may have numbers
    converted elsewhere. ``tensor_cap`` is the most inputs, and the most requested outputs.
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
            return None  # it is refused when all is read
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
        """Give the request, once all text was fed, the end of it as such.

        Raises GatewayError (400) that names the tensor for whatever the header gets wrong.
        """
        header = self._finish_header()
        fields, inputs = header.fields, self._inputs
        entries = fields["inputs"]
        answer = read_output_encoding(fields, self._tensor_cap)
        features = read_features(fields, inputs)
        converted = {
            array.index: self._checked_tensor(array, inputs[array.index]) for array in self._arrays
        }
        for index, tensor in converted.items():
            set_binary_size(entries[index], tensor.size)
        changed = request_binary_outputs(fields) or may_hide_classification(header.text)
        # Byte for byte where nothing had to change.
        text = orjson.dumps(fields) if changed or converted else header.text
        input_encodings = {
            index: BytesEncoding.BASE64 if inputs[index].base64 else BytesEncoding.UTF8
            for index in converted
        }
        return InferRequest(text, _body(inputs, converted), answer, features, input_encodings)


MAX_CACHED_HEADER = 4 * 1024
"""Bytes of JSON at most that ``header_without_data`` takes."""


@lru_cache(maxsize=CACHED_DOCUMENTS)
def header_without_data(
    text: bytes, depth_cap: int, tensor_cap: int = MAX_TENSORS
) -> InferRequest | None:
    """Give the request that a JSON part makes by itself; None where data may stand in it.

    Of requests in binary form, most have the same as one before. Raises GatewayError (400).
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
