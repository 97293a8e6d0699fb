"""Reads infer requests in JSON, with binary tensors behind it or not: as they arrive, or buffered.

Buffered requests are read within one time slice. Requests for a model look alike but for their data
and their id. The JSON around those is parsed once, and what is parsed of it is cached. Unusual and
invalid requests are left to InferRequestReader; for all others both give the same result.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

from gateway.codec import native
from gateway.codec.elements.decode import TensorDecoder, decode_numbers, decode_strings
from gateway.codec.json.array_scanner import max_depth
from gateway.codec.json.body_checks import check_header_end
from gateway.codec.json.data_extractor import placeholder
from gateway.codec.json.text_search import has_data_key
from gateway.codec.offload_interface import Offloader
from gateway.codec.v2.json_reader import JsonMessageReader
from gateway.errors import GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.json_errors import ExtractedArray
from gateway.protocol.messages import (
    Fields,
    InferRequest,
    InferRequestHead,
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
from gateway.protocol.tensors import MAX_TENSORS, element_count
from gateway.sizes import CACHED_DOCUMENTS, MAX_CACHED_DOCUMENT, MAX_FAST_REQUEST, MAX_UNSCHEDULED
from gateway.system.bounded_cache import cached

MAX_CACHED_HEADER: Final = 4 * 1024
"""The most bytes of JSON that ``read_without_data`` accepts."""

_MAX_FAST_ELEMENTS: Final = 128 * 1024
"""The most elements of a request that is read in one time slice: each may take ten nanoseconds."""

_MAX_OBJECTS: Final = 64
"""Each may be a tensor, which takes some 20 us, however short its text."""

_KEYS: Final = {
    name: re.compile(rb'"%b"[ \t\r\n]*+:' % name.encode()) for name in ("data", "datatype")
}
"""Keys in a text without escapes, where no string contains a quote."""


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


def read_without_data(
    text: bytes, depth_cap: int, tensor_cap: int = MAX_TENSORS
) -> InferRequest | None:
    """Read a JSON part that contains no data; return None if it may contain some.

    Most binary requests have the header of one before but for the id; its request is cached. Raises
    GatewayError (400).
    """
    split = native.split_document(text, len(text))
    if split is None or split[3]:
        return None  # escapes could hide a key
    common, request_id = split[:2]
    if request_id:
        try:
            request = _read_without_data(common, depth_cap, tensor_cap)
        except GatewayError:
            request = None  # an error quotes the text as it came
        if request and request.id == "":
            own_text = text if request.text else b""
            return InferRequest(request.head, request_id, request.tensors, own_text)
    return _read_without_data(text, depth_cap, tensor_cap) or None


@cached(CACHED_DOCUMENTS)
def _read_without_data(
    text: bytes, depth_cap: int, tensor_cap: int
) -> InferRequest | Literal[False]:
    if has_data_key(text):
        return False
    reader = InferRequestReader(len(text), depth_cap, tensor_cap=tensor_cap)
    reader.feed(text, last=True)
    return reader.finish()


def read_buffered_json(
    body: bytes, header_cap: int, depth_cap: int, tensor_cap: int
) -> InferRequest | None:
    """Read a request that is all JSON; None if that takes more than one time slice.

    ``header_cap`` limits its JSON in bytes, ``depth_cap`` the nesting, ``tensor_cap`` the tensors.
    Raises GatewayError (400).
    """
    if not 0 < len(body) <= min(MAX_FAST_REQUEST, header_cap):
        return None
    request = read_json_fast(body, depth_cap, tensor_cap)
    request = request or _read_small(body, header_cap, depth_cap, tensor_cap)
    return None if request is None or request.missing_size else request


def read_buffered_binary(
    body: bytes | memoryview, header_size: int, header_cap: int, depth_cap: int, tensor_cap: int
) -> InferRequest | None:
    """Read a request of which ``header_size`` bytes are JSON; as ``read_buffered_json``."""
    if header_size > min(len(body), header_cap):
        return None
    text = bytes(body[:header_size])
    request = None
    if header_size <= MAX_CACHED_HEADER:
        request = read_without_data(text, depth_cap, tensor_cap)
    request = request or _read_small(text, header_cap, depth_cap, tensor_cap)
    if request is None or request.missing_size != len(body) - header_size:
        return None
    return with_data(request, body, header_size)


def _read_small(
    text: bytes, header_cap: int, depth_cap: int, tensor_cap: int
) -> InferRequest | None:
    """Read the JSON of a request that fits into a time slice; raises GatewayError."""
    if len(text) > MAX_UNSCHEDULED or text.count(b"{") > _MAX_OBJECTS:
        return None
    reader = InferRequestReader(header_cap, depth_cap, tensor_cap=tensor_cap)
    reader.feed(text, last=True)
    return reader.finish()


def with_data(request: InferRequest, body: bytes | memoryview, start: int) -> InferRequest:
    """Return a request with its data, of which those still to come begin at ``start``."""
    tensors: list[TensorData] = []
    data = memoryview(body)
    for part in request.tensors:
        if isinstance(part, int):
            tensors.append((data[start : start + part],))
            start += part
        else:
            tensors.append(part)
    return InferRequest(request.head, request.id, tuple(tensors), request.text)


def read_json_fast(
    text: bytes, depth_cap: int, tensor_cap: int = MAX_TENSORS
) -> InferRequest | None:
    """Read a JSON request; ``depth_cap`` limits its nesting, ``tensor_cap`` its tensors.

    Returns None if InferRequestReader is needed.
    """
    split = native.split_document(text, MAX_CACHED_DOCUMENT)
    if split is None:
        return None
    common, request_id, place, arrays = split
    parsed = _cached_parse(common, len(arrays), depth_cap, tensor_cap)
    if request_id is not None and (not parsed or parsed.id is None):
        # The id is not that of the request.
        whole = b"".join((common[:place], request_id.encode(), common[place:]))
        parsed, request_id = _cached_parse(whole, len(arrays), depth_cap, tensor_cap), None
    if not parsed or (len(text) > 2 * _MAX_FAST_ELEMENTS and _has_many_elements(parsed.head)):
        return None
    head, has_strings = parsed.head, False
    tensors: list[tuple[bytes]] = []
    try:
        for tensor in head.inputs:
            if tensor.base64 is not None:  # it has JSON data
                array, is_nested = arrays[len(tensors)]
                tensors.append((_pack(tensor, array, is_nested, depth_cap),))
                has_strings = has_strings or tensor.binary_size is None
    except ValueError:
        return None  # an invalid element, or a number of elements that does not match the shape
    if has_strings:
        head = _with_sizes(head, tensors)
    return InferRequest(head, parsed.id if request_id is None else request_id, tuple(tensors))


def _has_many_elements(head: InferRequestHead) -> bool:
    return sum(element_count(tensor.shape) for tensor in head.inputs) > _MAX_FAST_ELEMENTS


def _with_sizes(head: InferRequestHead, tensors: list[tuple[bytes]]) -> InferRequestHead:
    """Return the head of a request with the sizes of its strings."""
    sizes = iter([len(data) for (data,) in tensors])
    inputs = [
        tensor if tensor.base64 is None else tensor.with_size(next(sizes)) for tensor in head.inputs
    ]
    return replace(head, inputs=tuple(inputs), written={})


def _pack(tensor: InputTensor, array: bytes, is_nested: bool, depth_cap: int) -> bytes:
    """Return the bytes of an array; raises ValueError if there is anything to be said about it."""
    if tensor.binary_size is not None:
        data = decode_numbers(array, tensor.datatype)
        if data is None or len(data) != tensor.binary_size:
            raise ValueError("an element is invalid, or there are not as many as the shape takes")
        if is_nested and max_depth(array) > depth_cap:  # numpy takes longer than C
            raise ValueError("nested too deep")
        return data
    if is_nested and native.scan_strings(array, 0)[3] > depth_cap:
        raise ValueError("nested too deep")
    decoded = decode_strings(array)
    if decoded is None or decoded[0] != element_count(tensor.shape):
        raise ValueError("an element is invalid, or there are not as many as the shape takes")
    return decoded[1]


@cached(CACHED_DOCUMENTS)
def _cached_parse(
    surroundings: bytes, arrays: int, depth_cap: int, tensor_cap: int
) -> InferRequest | Literal[False]:
    """Return a request without its data; False if InferRequestReader is needed.

    Strings lack their size in the head.
    """
    try:
        fields = parse_request_header(surroundings, depth_cap)
        inputs = read_inputs(fields, tensor_cap)
        head = read_head(fields, inputs, tensor_cap)
    except GatewayError:
        return False
    if not head.features.is_plain:
        return False
    data = [entry["data"] for entry in fields["inputs"] if "data" in entry]
    if data != [placeholder(number) for number in range(arrays)]:
        return False
    # Arrays hold numbers or strings, so no keys.
    if any(len(key.findall(surroundings)) != _count(fields, name) for name, key in _KEYS.items()):
        return False  # a key is a duplicate
    if any(tensor.base64 or tensor.binary_size is not None for tensor in inputs):
        return False
    sized = tuple(map(_with_size, inputs))
    head = replace(head, inputs=sized, names_sequence=may_name_sequence(surroundings))
    return InferRequest(head, fields.get("id"), ())


def _with_size(tensor: InputTensor) -> InputTensor:
    """Return an input with the size of its JSON data, if that follows from its shape."""
    size = tensor.datatype.size
    if tensor.base64 is None or size is None:
        return tensor
    return tensor.with_size(size * element_count(tensor.shape))


def _count(value: object, name: str) -> int:
    """Count the members with a name in a parsed JSON value; its depth is limited."""
    if isinstance(value, list):
        return sum(_count(each, name) for each in value)
    if not isinstance(value, dict):
        return 0
    return (name in value) + sum(_count(each, name) for each in value.values())
