"""Writes infer responses as JSON, or with each output in the encoding that the client wants."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from gateway.codec.elements.encode import (
    OffloadedText,
    TensorEncoder,
    TextChunk,
    join_text,
    make_tensor_encoder,
)
from gateway.codec.offload_interface import Offloader
from gateway.codec.policies import JsonPolicies
from gateway.codec.v2.json_writer import (
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

Result = TypeVar("Result", covariant=True)


class ResponseWriter(Protocol[Result]):
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

    def finish(self) -> Result:
        """Return what is left, once all data were encoded."""


class ResponseConverter(Generic[Result]):
    """Has a writer write what a reader reads; ``make_writer`` takes the response without data."""

    def __init__(
        self,
        reader: InferResponseReader,
        make_writer: Callable[[InferResponse], ResponseWriter[Result]],
    ) -> None:
        self._reader = reader
        self._make_writer = make_writer
        self._writer: ResponseWriter[Result] | None = None

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes of memory in use."""
        written = 0 if self._writer is None else self._writer.buffered_bytes
        return self._reader.buffered_bytes + written

    @property
    def element_count(self) -> int:
        """Return the number of elements of the response; 0 before its head was read."""
        response = self._reader.response
        return 0 if response is None else response.head.element_count

    def feed(self, data: bytes | memoryview, last: bool = False) -> None:
        """Take the next data for a writer that buffers them; ``step`` reads JSON among them.

        ``last`` marks the end of a response that is all JSON. Raises GatewayError as
        ResponseWriter does.
        """
        self._reader.feed(data, last)
        self._buffer()

    def step(self) -> bool:
        """Do one step; return whether there was work. Raises GatewayError as ``feed`` does."""
        if self._reader.step():
            return True
        self._buffer()
        return False

    def parts(
        self, data: bytes | memoryview, offloader: Offloader | None = None
    ) -> Iterator[TextChunk | OffloadedText]:
        """Yield the text for the next data; the ``offloader`` may encode parts of it.

        Raises GatewayError as ResponseWriter does.
        """
        self._reader.feed(data)
        while self._reader.step():
            pass
        yield from self._write(offloader)

    def text(self, data: bytes | memoryview) -> bytes:
        """Return the text for the next data; see ``parts``."""
        return join_text(self.parts(data))

    def finish(self) -> Result:
        """Return what is left, once all data were fed.

        Raises GatewayError as ResponseWriter does, and if the response is not complete.
        """
        self.feed(b"")
        self._reader.finish()
        assert self._writer is not None
        return self._writer.finish()

    def _buffer(self) -> None:
        """Have the writer take what was read; it has no text to give yet."""
        deque(self._write(), maxlen=0)

    def _write(self, offloader: Offloader | None = None) -> Iterator[TextChunk | OffloadedText]:
        if self._writer is None:
            if self._reader.response is None:
                return
            self._writer = self._make_writer(self._reader.response)
            yield from self._writer.start()
        for piece in self._reader.pieces():
            yield from self._writer.encode(piece, offloader)


class _OutputsWriter(JsonMessageWriter):
    """Writes a response by the policies for JSON."""

    def __init__(self, response: InferResponse, policies: JsonPolicies) -> None:
        super().__init__(response.head.outputs, RESPONSE, response.texts)
        self._response = response
        self._policies = policies

    def _make_encoder(self, index: int) -> TensorEncoder:
        output = self._tensors[index]
        label, of_output = RESPONSE.label(output.name), self._policies.of_output(output.name)
        return make_tensor_encoder(label, output.datatype, of_output)

    def _write_fields(self) -> Fields:
        return response_fields(self._response, self._policies)


class JsonResponseWriter(_OutputsWriter):
    """Writes a response as JSON while its data arrive; it is a ResponseWriter."""

    def finish(self) -> None:
        """Return nothing: all has been written."""


class EncodedResponseWriter(_OutputsWriter):
    """Writes each output in the requested encoding; it is a ResponseWriter.

    The header comes first and contains the JSON outputs, so that all data are buffered.
    ``body_cap`` limits them in bytes.
    """

    def __init__(
        self,
        response: InferResponse,
        encoding: OutputEncoding,
        policies: JsonPolicies,
        body_cap: int,
    ) -> None:
        super().__init__(response, policies)
        self._encoding = encoding
        self._body_cap = body_cap
        self._data: dict[int, list[bytes]] = {i: [*text] for i, text in response.texts.items()}
        """Text or binary data, by the index of their output."""
        self._size = sum(map(len, (chunk for text in self._data.values() for chunk in text)))
        self._chunks = len(self._data)

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes of memory in use."""
        return self._size + CHUNK_OVERHEAD * self._chunks

    def start(self) -> Iterator[bytes]:
        """Yield nothing."""
        return iter(())

    def encode(
        self, piece: TensorPiece, offloader: Offloader | None = None
    ) -> Iterator[TextChunk | OffloadedText]:
        """Encode and buffer the next piece; yield nothing."""
        # Copies: a view would pin the buffer that it is a part of.
        is_binary = self._is_binary(piece.index)
        data = bytes(piece.data) if is_binary else join_text(self._encode_data(piece))
        self._data.setdefault(piece.index, []).append(data)
        self._size += len(data)
        self._chunks += 1
        if self._size > self._body_cap:
            raise bad_response(
                f"a response of JSON and binary outputs must be buffered, and exceeds "
                f"{self._body_cap} bytes (limits.max_buffered_body_bytes); "
                "ask for all outputs in one form"
            )
        return iter(())

    def finish(self) -> tuple[bytes, list[bytes]]:
        """Return the header and the binary tensors behind it."""
        fields = self._write_fields()
        tensors: list[bytes] = []
        texts: list[list[bytes]] = []
        has_text = [False] * len(self._tensors)
        for index, chunks in sorted(self._data.items()):
            if self._is_binary(index):
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

    def _is_binary(self, index: int) -> bool:
        return self._encoding.wants_binary(self._tensors[index].name)


def response_fields(response: InferResponse, policies: JsonPolicies) -> Fields:
    """Return the members of a response, with its outputs but without data."""
    head = response.head
    known = {"id": response.id, "model_name": head.model, "model_version": head.version}
    fields: Fields = {key: value for key, value in known.items() if value is not None}
    if head.parameters:
        fields["parameters"] = head.parameters
    outputs = []
    for output in head.outputs:
        entry = tensor_fields(
            output.name, output.datatype, output.shape, output.parameters, output.extra
        )
        is_text = output.binary_size is not None and output.datatype.family is Family.TEXT
        if is_text and output.name in policies.as_base64:
            mark_base64(entry)
        outputs.append(entry)
    return {**fields, **head.extra, **({"outputs": outputs} if outputs else {})}


def json_converter(
    header_size: int | None, policies: JsonPolicies, header_cap: int, body_cap: int
) -> ResponseConverter[None]:
    """Make the converter of a response that becomes JSON; see InferResponseReader."""
    reader = InferResponseReader(header_size, header_cap, body_cap, ALL_JSON, policies)
    return ResponseConverter(reader, lambda response: JsonResponseWriter(response, policies))


def encoded_converter(
    header_size: int | None,
    encoding: OutputEncoding,
    policies: JsonPolicies,
    header_cap: int,
    body_cap: int,
) -> ResponseConverter[tuple[bytes, list[bytes]]]:
    """Make the converter of a response to the requested encoding; see InferResponseReader."""
    reader = InferResponseReader(header_size, header_cap, body_cap, encoding, policies)
    return ResponseConverter(
        reader, lambda response: EncodedResponseWriter(response, encoding, policies, body_cap)
    )
