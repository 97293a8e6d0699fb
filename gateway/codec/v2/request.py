"""Reads infer requests in JSON, with binary tensors behind it or not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from gateway.codec.elements.decode import TensorDecoder
from gateway.codec.json.header_length_check import check_header_end
from gateway.codec.json.text_search import contains, has_data_key, split_id
from gateway.codec.offload_interface import Offloader
from gateway.codec.v2.json_reader import JsonMessageReader
from gateway.errors import GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.json_errors import ExtractedArray
from gateway.protocol.messages import (
    Fields,
    InferRequest,
    InputTensor,
    TensorData,
    may_name_sequence,
)
from gateway.protocol.request_features import may_hide_classification
from gateway.protocol.request_header import (
    has_base64_content,
    parse_request_header,
    read_head,
    read_inputs,
    requests_binary_explicitly,
)
from gateway.protocol.tensors import MAX_TENSORS
from gateway.sizes import CACHED_DOCUMENTS
from gateway.system.bounded_cache import cached


class InferRequestReader(JsonMessageReader):
    """Reads the JSON part of an infer request while it arrives, and buffers the data in it.

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
        self._finish_header()
        head = read_head(self._fields, self._inputs, self._tensor_cap)
        converted = {
            array.index: self._checked_tensor(array, self._inputs[array.index])
            for array in self._arrays
        }
        inputs: list[InputTensor] = []
        tensors: list[TensorData] = []
        for index, tensor in enumerate(self._inputs):
            if index in converted:
                tensor = tensor.with_size(converted[index].size)
                tensors.append(converted[index].chunks)
            elif tensor.binary_size is not None:
                tensors.append(tensor.binary_size)
            inputs.append(tensor)
        passes = (
            not converted
            and requests_binary_explicitly(self._fields)
            and not may_hide_classification(self._text)
        )
        head = replace(
            head,
            inputs=tuple(inputs),
            memory=self.header_size,
            names_sequence=may_name_sequence(self._text),
        )
        return InferRequest(
            head, self._fields.get("id"), tuple(tensors), self._text if passes else b""
        )


MAX_CACHED_HEADER = 4 * 1024
"""The most bytes of JSON that ``read_without_data`` accepts."""


def read_without_data(
    text: bytes, depth_cap: int, tensor_cap: int = MAX_TENSORS
) -> InferRequest | None:
    """Read a JSON part that contains no data; return None if it may contain some.

    Most binary requests have the header of one before but for the id; its request is cached. Raises
    GatewayError (400).
    """
    # Escapes could hide the key.
    if has_data_key(text) or contains(text, b"\\"):
        return None
    common, request_id = split_id(text)
    if request_id:
        with suppress(GatewayError):  # an error quotes the text as it came
            request = _read_without_data(common, depth_cap, tensor_cap)
            if request.id == "":
                own_text = text if request.text else b""
                return InferRequest(request.head, request_id, request.tensors, own_text)
    return _read_without_data(text, depth_cap, tensor_cap)


@cached(CACHED_DOCUMENTS)
def _read_without_data(text: bytes, depth_cap: int, tensor_cap: int) -> InferRequest:
    reader = InferRequestReader(len(text), depth_cap, tensor_cap=tensor_cap)
    reader.feed(text, last=True)
    return reader.finish()
