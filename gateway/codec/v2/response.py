"""Writes infer responses as JSON, or with each output in the encoding that the client wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from gateway.codec.elements.encode import OffloadedText, TextChunk, join_text
from gateway.codec.offload_interface import Offloader
from gateway.codec.policies import JsonPolicies
from gateway.codec.v2.json_writer import (
    DataEncoder,
    JsonMessageWriter,
    TensorPiece,
    split_around_data,
    tensor_fields,
)
from gateway.codec.v2.response_reader import InferResponseReader
from gateway.errors import bad_response
from gateway.protocol.datatypes import Family
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.messages import ALL_JSON, Fields, InferResponse, OutputEncoding
from gateway.protocol.request_header import mark_base64
from gateway.sizes import CHUNK_OVERHEAD


class ResponseWriter(Protocol):
    """Writes a response in the form of a client while its data arrive.

    Each method raises GatewayError: 502 for an invalid response or one over a cap, 406 if the form
    or a policy refuses a value.
    """

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes of memory in use."""

    def start(self) -> Iterator[bytes]:
        """Yield the text before the first data."""

    def encode(
        self, piece: TensorPiece, offloader: Offloader | None = None
    ) -> Iterator[TextChunk | OffloadedText]:
        """Yield the text for the next piece; the ``offloader`` may encode parts of it."""

    def finish(self) -> Iterator[bytes]:
        """Yield what is left, once all data were encoded."""


class ResponseConverter:
    """Has a writer write what a reader reads; ``make_writer`` takes the response without data."""

    def __init__(
        self, reader: InferResponseReader, make_writer: Callable[[InferResponse], ResponseWriter]
    ) -> None:
        self._reader = reader
        self._make_writer = make_writer
        self._writer: ResponseWriter | None = None

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes of memory in use."""
        written = 0 if self._writer is None else self._writer.buffered_bytes
        return self._reader.buffered_bytes + written

    @property
    def element_count(self) -> int:
        """Return the number of elements of the response; 0 before its head was read."""
        return self._reader.element_count

    @property
    def has_only_numbers(self) -> bool:
        """Whether the head was read, and all outputs have elements of one size."""
        response = self._reader.response
        return response is not None and all(each.datatype.size for each in response.head.outputs)

    def parts(
        self, data: bytes | memoryview, offloader: Offloader | None = None
    ) -> Iterator[TextChunk | OffloadedText]:
        """Yield the text for the next data; the ``offloader`` may encode parts of it.

        Raises GatewayError as ResponseWriter does.
        """
        self._reader.feed(data)
        while self._reader.step():
            pass
        if self._writer is None:
            if self._reader.response is None:
                return
            self._writer = self._make_writer(self._reader.response)
            yield from self._writer.start()
        for piece in self._reader.pieces():
            yield from self._writer.encode(piece, offloader)

    def text(self, data: bytes | memoryview) -> bytes:
        """Return the text for the next data; see ``parts``."""
        return join_text(self.parts(data))

    def finish(self) -> Iterator[bytes]:
        """Return what is left, once all data were fed; the response begins with them.

        Raises GatewayError as ResponseWriter does, and if the response is not complete.
        """
        self._reader.finish()
        assert self._writer is not None
        return self._writer.finish()


def response_fields(response: InferResponse, policies: JsonPolicies) -> Fields:
    """Return the members of a response, with its outputs but without data."""
    head = response.head
    known = {"id": response.id, "model_name": head.model, "model_version": head.version}
    fields: Fields = {key: value for key, value in known.items() if value is not None}
    if head.parameters:
        fields["parameters"] = head.parameters
    outputs = []
    for output in head.outputs:
        entry = tensor_fields(output, output.parameters)
        is_text = output.binary_size is not None and output.datatype.family is Family.TEXT
        if is_text and output.name in policies.as_base64:
            mark_base64(entry)
        outputs.append(entry)
    return {**fields, **head.extra, **({"outputs": outputs} if outputs else {})}


def json_converter(
    header_size: int | None, policies: JsonPolicies, header_cap: int, body_cap: int
) -> ResponseConverter:
    """Make the converter of a response that becomes JSON; see InferResponseReader."""

    def make_writer(response: InferResponse) -> JsonMessageWriter:
        fields, outputs = response_fields(response, policies), response.head.outputs
        return JsonMessageWriter(fields, outputs, _by_name(policies), RESPONSE, response.texts)

    reader = InferResponseReader(header_size, header_cap, body_cap, ALL_JSON, policies)
    return ResponseConverter(reader, make_writer)


def _by_name(policies: JsonPolicies) -> Callable[[Any], JsonPolicies]:
    return lambda output: policies.of_output(output.name)


class ResponseEncoder:
    """Converts each output of a response to the requested encoding; see InferResponseReader.

    The header comes first and contains the JSON outputs, so that all data are buffered.
    ``body_cap`` limits them in bytes. Each method raises GatewayError as ResponseWriter does.
    """

    def __init__(
        self,
        header_size: int | None,
        encoding: OutputEncoding,
        policies: JsonPolicies,
        header_cap: int,
        body_cap: int,
    ) -> None:
        self._reader = InferResponseReader(header_size, header_cap, body_cap, encoding, policies)
        self._encoding = encoding
        self._policies = policies
        self._body_cap = body_cap
        self._encoder: DataEncoder | None = None
        self._data: dict[int, list[bytes]] = {}
        """Text or binary data, by the index of their output."""
        self._size = self._chunks = 0

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes of memory in use."""
        return self._reader.buffered_bytes + self._size + CHUNK_OVERHEAD * self._chunks

    @property
    def element_count(self) -> int:
        """Return the number of elements of the response; 0 before its head was read."""
        return self._reader.element_count

    def feed(self, data: bytes | memoryview, last: bool = False) -> None:
        """Take the next data; ``last`` marks the end of a response that is all JSON."""
        self._reader.feed(data, last)
        self._buffer()

    def step(self) -> bool:
        """Read some of the JSON; return whether there was any."""
        if self._reader.step():
            return True
        self._buffer()
        return False

    def finish(self) -> tuple[bytes, list[bytes]]:
        """Return the header and the binary tensors behind it, once all data were fed."""
        self.feed(b"")
        self._reader.finish()
        response = self._reader.response
        assert response is not None
        fields = response_fields(response, self._policies)
        tensors: list[bytes] = []
        texts: list[list[bytes]] = []
        has_text = [False] * len(response.head.outputs)
        for index, chunks in sorted(self._data.items()):
            if self._encoding.wants_binary(response.head.outputs[index].name):
                tensors += chunks
                entry = fields["outputs"][index]
                size = {"binary_data_size": sum(map(len, chunks))}
                entry["parameters"] = {**(entry.get("parameters") or {}), **size}
            else:
                texts.append(chunks)
                has_text[index] = True
        start, *parts = split_around_data(fields, RESPONSE.tensors, has_text)
        header = [start]
        for text, after in zip(texts, parts, strict=True):
            header += [*text, after]
        return b"".join(header), tensors

    def _buffer(self) -> None:
        """Buffer what was read, in the encoding of its output."""
        response = self._reader.response
        if response is None:
            return
        outputs = response.head.outputs
        if self._encoder is None:
            self._encoder = DataEncoder(outputs, _by_name(self._policies), RESPONSE)
            for index, text in response.texts.items():
                self._add(index, [*text])
        for piece in self._reader.pieces():
            # Copies: a view would pin the buffer that it is a part of.
            if self._encoding.wants_binary(outputs[piece.index].name):
                self._add(piece.index, [bytes(piece.data)])
            else:
                self._add(piece.index, [join_text(self._encoder.parts(piece))])
            if self._size > self._body_cap:
                raise bad_response(
                    "a response of JSON and binary outputs must be buffered, and exceeds "
                    f"{self._body_cap} bytes (limits.max_buffered_body_bytes); "
                    "ask for all outputs in one form"
                )

    def _add(self, index: int, chunks: list[bytes]) -> None:
        self._data.setdefault(index, []).extend(chunks)
        self._size += sum(map(len, chunks))
        self._chunks += len(chunks)
