"""Reads infer responses: binary, JSON, and those with outputs of both."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, Literal

import orjson

from gateway.codec import native
from gateway.codec.elements.decode import TensorDecoder
from gateway.codec.elements.encode import make_tensor_encoder
from gateway.codec.json.array_scanner import ElementRun, StringPart
from gateway.codec.json.data_extractor import Event
from gateway.codec.json.parse_cost import estimate_parsed_size
from gateway.codec.json.text_search import has_data_key
from gateway.codec.policies import DEFAULT_POLICIES, BytesEncoding, JsonPolicies
from gateway.codec.v2.json_reader import ElementSink, JsonMessageReader
from gateway.codec.v2.json_writer import TensorPiece, TensorSplitter
from gateway.errors import GatewayError, bad_response
from gateway.protocol.datatypes import DATATYPES, Family
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.json_errors import ExtractedArray
from gateway.protocol.messages import (
    ALL_BINARY,
    Fields,
    InferResponse,
    OutputEncoding,
    OutputTensor,
)
from gateway.protocol.request_header import has_base64_content, without
from gateway.protocol.response_header import (
    MAX_OUTPUTS,
    MAX_RESPONSE_DEPTH,
    parse_response_header,
    read_outputs,
    read_response_head,
)
from gateway.sizes import CACHED_DOCUMENTS, MAX_CACHED_DOCUMENT
from gateway.system.bounded_cache import cached

_BASE64_POLICIES: Final = JsonPolicies(bytes_encoding=BytesEncoding.BASE64)

_OUTPUT_OVERHEAD: Final = 350
"""Bytes of memory of an output beside its name and parameters."""


class InferResponseReader:
    """Reads a response while it arrives.

    ``header_size`` is the size of its JSON part, None if it is all JSON. ``header_cap`` limits the
    JSON around data, ``body_cap`` the data in it, both in bytes.

    Data in JSON that the client wants as JSON stay the server's text. Only BYTES that ``policies``
    want as base64 are encoded and marked, unless they are base64 already. In other JSON data, null
    becomes NaN, and BYTES are decoded from base64 if their content type says so.
    """

    def __init__(
        self,
        header_size: int | None,
        header_cap: int,
        body_cap: int,
        encoding: OutputEncoding = ALL_BINARY,
        policies: JsonPolicies = DEFAULT_POLICIES,
    ) -> None:
        self.response: InferResponse | None = None
        """The response without data, once its JSON part was read."""
        self._is_json = header_size is None
        self._missing_json = sys.maxsize if header_size is None else header_size
        self._new_json = partial(_JsonReader, encoding, header_cap, body_cap, policies)
        self._header = b""
        """A small JSON part, buffered until it is complete."""
        self._json: _JsonReader | None = None
        """The reader of any other JSON part, and of one that contains data."""
        if self._missing_json > MAX_CACHED_DOCUMENT:
            self._json = self._new_json()
        self._splitter = TensorSplitter((), RESPONSE)
        self._data: list[bytes | memoryview] = []

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes of memory in use."""
        in_json = 0 if self._json is None else self._json.buffered_bytes
        read = 0 if self.response is None else self.response.head.memory
        return in_json + len(self._header) + sum(map(len, self._data)) + read

    @property
    def element_count(self) -> int:
        """Return the number of elements of the response; 0 before its head was read."""
        return 0 if self.response is None else self.response.head.element_count

    def feed(self, data: bytes | memoryview, last: bool = False) -> None:
        """Take the next data, from which ``pieces`` are made; ``last`` marks the end.

        Raises GatewayError (502) for an invalid response or one over a cap.
        """
        while self.step():
            pass
        if self.response is None:
            text, data = data[: self._missing_json], bytes(data[self._missing_json :])
            self._missing_json -= len(text)
            self._feed_json(text, last and self._is_json)
        if data:
            self._data.append(data)

    def step(self) -> bool:
        """Do one step; return whether there was work. Raises GatewayError as ``feed`` does."""
        if self._json is None:
            return False
        if self._json.step():
            return True
        if not self._missing_json:
            self._start(*self._json.take(self._is_json))
        return False

    def pieces(self) -> Iterator[TensorPiece]:
        """Yield the data of outputs that have come; raises GatewayError as ``feed`` does."""
        if self.response is None:
            return
        data, self._data = self._data, []
        for each in data or (b"",):
            yield from self._splitter.feed(each)

    def finish(self) -> None:
        """Check that the response is complete; raises GatewayError as ``feed`` does."""
        if self.response is None:
            raise RESPONSE.malformed(
                f"{RESPONSE.name} ends before all that its header says has come"
            )
        self._splitter.finish()

    def _feed_json(self, text: bytes | memoryview, last: bool) -> None:
        if last:
            self._missing_json = 0
        if self._json is not None:
            self._json.feed(text, last=not self._missing_json)
            return
        self._header += text
        if self._missing_json:
            return
        response = read_without_data(self._header)
        if response is None:
            self._json = self._new_json()
            self._json.feed(self._header, last=True)
        else:
            self._start(response, {})
        self._header = b""

    def _start(self, response: InferResponse, data: dict[int, Sequence[bytes]]) -> None:
        """Start to read the data."""
        self.response = response
        self._json = None
        self._splitter = TensorSplitter(response.head.outputs, RESPONSE, data)


def read_header_fast(body: bytes, header_size: int) -> InferResponse | None:
    """Read the header of a buffered response; None if it is large, invalid or contains data."""
    if header_size > MAX_CACHED_DOCUMENT:
        return None
    try:
        return read_without_data(body[:header_size])
    except GatewayError:
        return None


def read_binary_fast(
    body: bytes, header_size: int
) -> tuple[InferResponse, list[memoryview]] | None:
    """Read a buffered response with the data of its outputs, but for those in shared memory.

    Returns None if InferResponseReader is needed.
    """
    response = read_header_fast(body, header_size)
    if response is None:
        return None
    data, start, tensors = memoryview(body), header_size, []
    for output in response.head.outputs:
        if output.binary_size is not None:
            end = start + output.binary_size
            tensors.append(data[start:end])
            start = end
    return (response, tensors) if start == len(body) else None


def read_without_data(header: bytes) -> InferResponse | None:
    """Read a JSON part that contains no data; return None if it may contain some.

    Most responses of a model have the header of one before but for the id; it is cached. Raises
    GatewayError (502).
    """
    split = native.split_document(header, len(header))
    if split is None or split[3]:
        return None  # escapes could hide a key
    common, response_id = split[:2]
    if response_id:
        try:
            response = _read_without_data(common)
        except GatewayError:
            response = None  # an error quotes the text as it came
        if response and response.id == "":
            return InferResponse(response.head, response_id)
    return _read_without_data(header) or None


@cached(CACHED_DOCUMENTS)
def _read_without_data(header: bytes) -> InferResponse | Literal[False]:
    if has_data_key(header):
        return False
    fields = parse_response_header(header)
    return _response(fields, read_outputs(fields))


def _response(
    fields: Fields,
    outputs: tuple[OutputTensor, ...],
    texts: dict[int, Sequence[bytes]] | None = None,
) -> InferResponse:
    if "outputs" not in fields:
        raise bad_response("the server's response has no outputs")
    head = read_response_head(fields, outputs)
    others = [fields.get("id"), head.model, head.version, head.parameters, head.extra]
    memory = 0
    for output in outputs:
        others += filter(None, (output.parameters, output.extra))
        memory += _OUTPUT_OVERHEAD + len(output.name)
    memory += estimate_parsed_size(orjson.dumps(others))
    head = replace(head, memory=memory)
    response_id = fields.get("id")
    return InferResponse(head, response_id if isinstance(response_id, str) else None, texts or {})


class _JsonReader(JsonMessageReader):
    """Reads the JSON part of a response, and buffers the data in it; see InferResponseReader."""

    def __init__(
        self, encoding: OutputEncoding, header_cap: int, body_cap: int, policies: JsonPolicies
    ) -> None:
        super().__init__(RESPONSE, header_cap, MAX_RESPONSE_DEPTH, tensor_cap=MAX_OUTPUTS)
        self._encoding = encoding
        self._policies = policies
        self._body_cap = body_cap
        self._outputs: tuple[OutputTensor, ...] = ()

    def _handle_event(self, event: Event) -> None:
        super()._handle_event(event)
        self._convert_next()  # the cap counts data in the client's encoding

    def _convert_next(self) -> bool:
        has_converted = super()._convert_next()
        if self.buffered_data_bytes > self._body_cap:
            encoding, advice = "binary", "ask for all outputs as JSON"
            if self._encoding.all_json:
                encoding, advice = "base64", "ask for all outputs in binary form"
            raise bad_response(
                f"a response that becomes {encoding} must be buffered, and exceeds "
                f"{self._body_cap} bytes (limits.max_buffered_body_bytes); {advice}"
            )
        return has_converted

    def take(self, is_all: bool) -> tuple[InferResponse, dict[int, Sequence[bytes]]]:
        """Return the response, and the data that were no text, by the index of their output.

        ``is_all`` tells that nothing follows the JSON; else binary data behind it replace data in
        it. Raises GatewayError (502) that names the output for anything invalid.
        """
        self._finish_header()
        texts: dict[int, Sequence[bytes]] = {}
        data: dict[int, Sequence[bytes]] = {}
        outputs = [*self._outputs]
        for array in self._arrays:
            index, output = array.index, outputs[array.index]
            if output.binary_size is not None and not is_all:
                continue
            parameters = output.parameters
            if isinstance(array.sink, _VerbatimText | _Base64Text):
                texts[index] = [array.sink.text]
                size = None
                if isinstance(array.sink, _Base64Text):
                    parameters = {**parameters, "content_type": "base64"}
            else:
                tensor = self._checked_tensor(array, output)
                data[index], size = tensor.chunks, tensor.size
                if (
                    output.datatype.family is Family.TEXT
                    and parameters.get("content_type") == "base64"
                ):
                    parameters = without(parameters, "content_type")  # it described the JSON data
            outputs[index] = replace(output, binary_size=size, parameters=parameters)
        for index, output in enumerate(outputs):
            if is_all and index not in data and output.binary_size:
                raise bad_response(
                    f"output '{output.name}' of the server's response has {output.binary_size} "
                    "bytes, which do not follow its JSON"
                )
        return _response(self._fields, tuple(outputs), texts), data

    def _make_sink(self, label: str, fields: Fields) -> ElementSink | None:
        if "name" not in fields:
            return None
        name, datatype = str(fields["name"]), fields.get("datatype")
        if self._encoding.wants_binary(name):
            if isinstance(datatype, str) and datatype in DATATYPES:
                return TensorDecoder(label, DATATYPES[datatype], RESPONSE)
            return None
        if not self._policies.wants_base64(name):
            return _VerbatimText(label)
        # The content type may follow the data; it is known once all fields are.
        is_complete = isinstance(fields.get("data"), list)  # the placeholder: all fields are known
        if not is_complete and not fields.keys() >= {"datatype", "parameters"}:
            return None
        return _Base64Text(label) if becomes_base64(fields) else _VerbatimText(label)

    def _parse_header(
        self, text: bytes, cuts: Sequence[ExtractedArray]
    ) -> tuple[Fields, tuple[OutputTensor, ...]]:
        fields = parse_response_header(text, cuts)
        self._outputs = read_outputs(fields)
        return fields, self._outputs


class _VerbatimText:
    """The text between the brackets of an array, as it came; ``label`` names its output."""

    def __init__(self, label: str) -> None:
        self.size = 0
        self._label = label
        self._chunks: list[bytes] = []
        self._string: list[bytes] = []

    @property
    def text(self) -> bytes:
        """Return the text of the complete array."""
        return b"".join(self._chunks)[1:-1]

    def feed(self, item: ElementRun | StringPart) -> None:
        """Take the next run or piece of a long string; raises GatewayError (502) if invalid."""
        if isinstance(item, StringPart):
            self._string.append(item.text)
            self.size += len(item.text)
            return
        self._check(item)
        text = item.text
        if self._string:
            # The first string is the placeholder of the long one.
            head, _, tail = text.partition(b'""')
            text = b"".join((head, b'"', *self._string, b'"', tail))
            self._string = []
        self._chunks += [text] if item.first else [b",", text]
        self.size += len(text)

    def _check(self, run: ElementRun) -> None:
        """Check that the run is JSON, apart from bare NaN and infinities."""
        if not run.lacks_element:
            text = run.balanced()
            with suppress(orjson.JSONDecodeError):
                orjson.loads(text)
                return
            with suppress(ValueError):
                json.loads(text, parse_int=str, parse_float=str)
                return
        raise bad_response(
            f"{self._label} of the server's response has data that are no JSON array"
        )


class _Base64Text:
    """The strings of an array, encoded as base64; ``label`` names its output."""

    def __init__(self, label: str) -> None:
        self.size = 0
        self._strings = TensorDecoder(label, DATATYPES["BYTES"], RESPONSE)
        self._writer = make_tensor_encoder(label, DATATYPES["BYTES"], _BASE64_POLICIES)
        self._chunks: list[bytes | memoryview] = []

    @property
    def text(self) -> bytes:
        """Return the text between the brackets of the complete array."""
        return b"".join(self._chunks)

    def feed(self, item: ElementRun | StringPart) -> None:
        """Take the next run or piece of a long string; raises GatewayError (502) if invalid."""
        strings = self._strings
        before_size = strings.size
        strings.feed(item)
        self.size += strings.size - before_size
        if isinstance(item, StringPart):
            return  # its length is not known yet
        texts = list(map(self._writer.feed, strings.chunks))
        self.size += sum(map(len, texts)) - strings.size
        strings.chunks, strings.size = [], 0
        self._chunks += texts


def becomes_base64(entry: Fields) -> bool:
    """Tell whether an output's data must be encoded to become base64."""
    return entry.get("datatype") == "BYTES" and not has_base64_content(entry)


def has_text_for_base64(entry: Fields, policies: JsonPolicies) -> bool:
    """Tell whether an output has BYTES in JSON that must become base64."""
    return (
        isinstance(entry.get("data"), list)
        and policies.wants_base64(str(entry.get("name")))
        and becomes_base64(entry)
    )
