"""Converts binary and mixed responses for clients that want JSON, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gateway.codec.elements.base64_elements import encode_base64
from gateway.codec.elements.encode import TensorEncoder, make_tensor_encoder
from gateway.codec.policies import BytesEncoding, JsonPolicies
from gateway.codec.v2.binary_response import (
    BinaryResponseConverter,
    Chunks,
    ResponseParts,
    becomes_base64,
)
from gateway.codec.v2.json_writer import (
    JsonMessageWriter,
    TensorPiece,
    TensorReader,
    check_element_count,
    truncated_error,
)
from gateway.errors import bad_response
from gateway.protocol.datatypes import Family
from gateway.protocol.error_vocabulary import RESPONSE, Tensor
from gateway.protocol.messages import Fields, OutputEncoding
from gateway.protocol.request_header import mark_base64
from gateway.protocol.response_header import OutputTensor, parse_response_header, read_outputs
from gateway.sizes import CHUNK_OVERHEAD


def response_reader(header_size: int) -> TensorReader:
    """Make the reader of a binary response; ``header_size`` is the size of its JSON part."""
    return TensorReader(header_size, _parse, RESPONSE)


def _parse(header: bytes) -> tuple[Fields, tuple[OutputTensor, ...]]:
    fields = parse_response_header(header)
    return fields, read_outputs(fields)


class JsonResponseConverter(JsonMessageWriter):
    """Writes a binary response as JSON while it arrives."""

    def __init__(self, header_size: int, policies: JsonPolicies) -> None:
        super().__init__(response_reader(header_size), RESPONSE)
        self._policies = policies

    def _make_encoder(self, index: int) -> TensorEncoder:
        return make_output_encoder(self._reader.tensors[index], self._policies)

    def _rewrite_fields(self, fields: Fields) -> Fields:
        _mark_base64_outputs(fields, self._reader.tensors, self._policies)
        for entry in fields.get("outputs", ()):
            # The server sent JSON although binary form was requested.
            if has_text_for_base64(entry, self._policies):
                mark_base64(entry)
                entry["data"] = _encode_strings(entry.pop("data"))
        return fields


class MixedResponseConverter:
    """Converts a response with JSON and binary outputs to the requested encoding of each.

    The header comes first and contains the JSON outputs. So everything is buffered until it is
    parsed. ``header_size`` is the size of the JSON part, data included. ``header_cap`` limits the
    JSON around the data, ``body_cap`` the data in the client's encoding, both in bytes.
    """

    def __init__(
        self,
        header_size: int,
        form: OutputEncoding,
        policies: JsonPolicies,
        header_cap: int,
        body_cap: int,
    ) -> None:
        self._missing_json = header_size
        self._has_all_json = False
        self._form = form
        self._policies = policies
        self._body_cap = body_cap
        self._json = BinaryResponseConverter(form, header_cap, body_cap, policies)
        self._tensor_bytes = b""
        self._parts: ResponseParts | None = None
        self._reader: TensorReader | None = None
        self._converters: dict[int, TensorEncoder] = {}
        self._size = 0
        self._chunks = 0

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes of memory in use."""
        return (
            self._json.buffered_bytes
            + len(self._tensor_bytes)
            + self._size
            + CHUNK_OVERHEAD * self._chunks
        )

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next data.

        Raises GatewayError: 502 for an invalid response or one over the cap, 406 if a policy
        refuses a value.
        """
        while self.step():
            pass
        if self._reader is not None and self._parts is not None:
            self._add_pieces(self._reader, self._parts, data)
            return
        text, self._tensor_bytes = data[: self._missing_json], bytes(data[self._missing_json :])
        self._missing_json -= len(text)
        self._has_all_json = not self._missing_json
        self._json.feed(text, last=self._has_all_json)

    def step(self) -> bool:
        """Do one step; return whether there was work. Raises GatewayError as ``feed`` does."""
        if self._reader is not None:
            return False
        if self._json.step():
            return True
        if self._has_all_json:
            self._begin_tensors()
        return False

    def finish(self) -> tuple[bytes, Chunks]:
        """Return the header and the binary tensors behind it, once all data was fed.

        Raises GatewayError as ``feed`` does.
        """
        while self.step():
            pass
        if self._reader is None or self._parts is None:
            raise truncated_error(RESPONSE)
        self._reader.finish()
        _mark_base64_outputs(self._parts.fields, self._parts.outputs, self._policies)
        return self._parts.joined()

    def _begin_tensors(self) -> None:
        """Start to read the binary tensors behind the JSON."""
        parts = self._json.take_parts()
        for index, output in enumerate(parts.outputs):
            if output.binary_size is not None:
                # Binary data behind the JSON replaces data within it.
                parts.texts.pop(index, None)
                parts.tensors.pop(index, None)
        self._parts = parts
        self._reader = TensorReader(0, lambda _: (parts.fields, parts.outputs), RESPONSE)
        self._add_pieces(self._reader, parts, self._tensor_bytes)
        self._tensor_bytes = b""

    def _add_pieces(
        self, reader: TensorReader, parts: ResponseParts, data: bytes | memoryview
    ) -> None:
        for piece in reader.feed(data):
            output = parts.outputs[piece.index]
            if self._form.wants_binary(output.name):
                # A copy: a view would pin the buffer that it is a part of.
                self._append(parts.tensors.setdefault(piece.index, []), bytes(piece.data))
            else:
                text = self._encode_piece(output, piece)
                self._append(parts.texts.setdefault(piece.index, []), text)

    def _encode_piece(self, output: Tensor, piece: TensorPiece) -> bytes:
        if piece.index not in self._converters:
            self._converters[piece.index] = make_output_encoder(output, self._policies)
        converter = self._converters[piece.index]
        text = converter.feed(piece.data)
        if piece.last:
            check_element_count(output, converter, RESPONSE)
        return text

    def _append(self, chunks: Chunks, data: bytes | memoryview) -> None:
        chunks.append(data)
        self._size += len(data)
        self._chunks += 1
        if self._json.buffered_data_bytes + self._size > self._body_cap:
            raise bad_response(
                f"a response of JSON and binary outputs must be buffered, and exceeds "
                f"{self._body_cap} bytes (limits.max_buffered_body_bytes); "
                "ask for all outputs in one form"
            )


def make_output_encoder(output: Tensor, policies: JsonPolicies) -> TensorEncoder:
    """Make the encoder of one output."""
    if policies.wants_base64(output.name):
        policies = replace(policies, bytes_encoding=BytesEncoding.BASE64)
    return make_tensor_encoder(RESPONSE.label(output.name), output.datatype, policies)


def _mark_base64_outputs(fields: Fields, outputs: Sequence[Tensor], policies: JsonPolicies) -> None:
    """Mark the outputs that become base64 because the request wants them so."""
    if not policies.as_base64:
        return
    for entry, output in zip(fields.get("outputs", ()), outputs, strict=True):
        is_text = output.binary_size is not None and output.datatype.family is Family.TEXT
        if is_text and output.name in policies.as_base64:
            mark_base64(entry)


def has_text_for_base64(entry: Fields, policies: JsonPolicies) -> bool:
    """Tell whether an output has BYTES in JSON that must become base64."""
    return (
        isinstance(entry.get("data"), list)
        and policies.wants_base64(str(entry.get("name")))
        and becomes_base64(entry)
    )


def _encode_strings(data: Any) -> Any:
    """Encode the strings of an array of any nesting."""
    if isinstance(data, list):
        return [_encode_strings(item) for item in data]
    return encode_base64(data.encode()).decode() if isinstance(data, str) else data
