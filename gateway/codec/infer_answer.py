"""Upstream form → client form: a binary answer turned into JSON, wholly or output by output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import orjson

from gateway.codec.elements_to_json import LentText, TensorToJson, tensor_to_json
from gateway.codec.loans import Lender
from gateway.codec.policies import BytesAs, JsonPolicies
from gateway.errors import bad_answer
from gateway.protocol.datatypes import Family
from gateway.protocol.inference_header import (
    AnswerForm,
    Fields,
    OutputTensor,
    parse_answer,
    read_outputs,
)
from gateway.protocol.tensors import element_count


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Bytes of the output number ``index``; ``last`` where they are its last."""

    index: int
    data: bytes | memoryview
    last: bool


class AnswerReader:
    """Takes the body of a binary answer; gives its fields, then the bytes of its tensors.

    ``header_size`` is the JSON part's, in bytes. Raises GatewayError (502) for a body that is
    not what its header says.
    """

    def __init__(self, header_size: int) -> None:
        self._header_size = header_size
        self._buffer = b""
        self._current = 0
        self._missing = 0
        self.fields: Fields | None = None
        self.outputs: tuple[OutputTensor, ...] = ()

    def feed(self, data: bytes | memoryview) -> Iterator[TensorPiece]:
        """Yield the pieces of tensors that the data brings; ``fields`` are set before the first."""
        if self.fields is None:
            self._buffer += data
            if len(self._buffer) < self._header_size:
                return
            data = self._buffer[self._header_size :]
            self.fields = parse_answer(self._buffer[: self._header_size])
            self.outputs = read_outputs(self.fields)
            self._buffer = b""
            yield from self._skip_empty()
        while data:
            if self._current == len(self.outputs):
                raise bad_answer("the server's answer holds more bytes than its header says")
            piece, data = data[: self._missing], data[self._missing :]
            self._missing -= len(piece)
            yield TensorPiece(self._current, piece, not self._missing)
            if not self._missing:
                self._current += 1
                yield from self._skip_empty()

    def finish(self) -> None:
        """Check that the body was whole."""
        if self.fields is None or self._current < len(self.outputs):
            raise bad_answer("the server's answer ends before all that its header says has come")

    def _skip_empty(self) -> Iterator[TensorPiece]:
        """Go to the next output that has bytes to come."""
        while self._current < len(self.outputs):
            self._missing = self.outputs[self._current].binary_size or 0
            if self._missing:
                return
            if self.outputs[self._current].binary_size == 0:
                yield TensorPiece(self._current, b"", last=True)
            self._current += 1


class JsonAnswer:
    """Writes an answer as JSON while it arrives."""

    def __init__(self, header_size: int, policies: JsonPolicies) -> None:
        self._reader = AnswerReader(header_size)
        self._policies = policies
        self._skeleton: list[bytes] | None = None
        self._converter: TensorToJson | None = None

    def feed(self, data: bytes | memoryview) -> bytes:
        """Give the text that the data brings.

        Raises GatewayError: 502 for a broken answer, 406 where a policy refuses a value.
        """
        return b"".join([part for part in self.parts(data) if isinstance(part, bytes)])

    def parts(
        self, data: bytes | memoryview, lender: Lender | None = None
    ) -> Iterator[bytes | LentText]:
        """Yield the text that the data brings; ``lender`` may have parts of it written elsewhere.

        Raises GatewayError as ``feed`` does.
        """
        for piece in self._reader.feed(data):
            if self._skeleton is None:
                yield self._begin()
            yield from self._write(piece, lender)
        if self._skeleton is None and self._reader.fields is not None:
            yield self._begin()

    def finish(self) -> None:
        """Check that the answer was whole; raises GatewayError (502)."""
        self._reader.finish()

    def _begin(self) -> bytes:
        wants_json = [output.binary_size is not None for output in self._reader.outputs]
        fields = self._reader.fields or {}
        _mark_base64(fields, self._reader.outputs, self._policies)
        self._skeleton = answer_skeleton(fields, wants_json)
        return self._skeleton.pop(0)

    def _write(self, piece: TensorPiece, lender: Lender | None) -> Iterator[bytes | LentText]:
        assert self._skeleton is not None
        output = self._reader.outputs[piece.index]
        if self._converter is None:
            self._converter = output_converter(output, self._policies)
        if lender is None:
            yield self._converter.feed(piece.data)
        else:
            yield from self._converter.parts(piece.data, lender)
        if piece.last:
            check_count(output, self._converter)
            self._converter = None
            yield self._skeleton.pop(0)


class MixedAnswer:
    """Holds an answer of which the client wants some outputs as JSON, others in binary form.

    The header, which comes first, holds the JSON outputs: so all is held until they are known.
    ``spool_cap`` is the number of bytes held at most.
    """

    def __init__(
        self, header_size: int, form: AnswerForm, policies: JsonPolicies, spool_cap: int
    ) -> None:
        self._reader = AnswerReader(header_size)
        self._form = form
        self._policies = policies
        self._spool_cap = spool_cap
        self.held = 0
        """Bytes so far."""
        self._converters: dict[int, TensorToJson] = {}
        self._texts: dict[int, list[bytes | memoryview]] = {}
        self._binary: list[bytes | memoryview] = []

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next data; raises GatewayError as JsonAnswer does, and 502 over the cap."""
        for piece in self._reader.feed(data):
            output = self._reader.outputs[piece.index]
            if self._form.wants_binary(output.name):
                self._hold(self._binary, piece.data)
            else:
                self._convert(output, piece)

    def finish(self) -> tuple[bytes, list[bytes | memoryview]]:
        """Give the header and the binary tensors behind it."""
        self._reader.finish()
        wants_json = [i in self._texts for i in range(len(self._reader.outputs))]
        fields = self._reader.fields or {}
        _mark_base64(fields, self._reader.outputs, self._policies)
        skeleton = answer_skeleton(fields, wants_json)
        header: list[bytes | memoryview] = [skeleton[0]]
        for index, text in zip(sorted(self._texts), skeleton[1:], strict=True):
            header += [*self._texts[index], text]
        return b"".join(header), self._binary

    def _convert(self, output: OutputTensor, piece: TensorPiece) -> None:
        if piece.index not in self._converters:
            self._converters[piece.index] = output_converter(output, self._policies)
            self._texts[piece.index] = []
        converter = self._converters[piece.index]
        self._hold(self._texts[piece.index], converter.feed(piece.data))
        if piece.last:
            check_count(output, converter)

    def _hold(self, where: list[bytes | memoryview], data: bytes | memoryview) -> None:
        where.append(data)
        self.held += len(data)
        if self.held > self._spool_cap:
            raise bad_answer(
                f"an answer of JSON and binary outputs is held, and is larger than "
                f"{self._spool_cap} bytes (limits.spool_bytes); ask for all outputs in one form"
            )


def output_converter(output: OutputTensor, policies: JsonPolicies) -> TensorToJson:
    """Make the converter of one output to JSON."""
    if output.name in policies.as_base64:
        policies = replace(policies, bytes_as=BytesAs.BASE64)
    return tensor_to_json(f"output '{output.name}'", output.datatype, policies)


def check_count(output: OutputTensor, converter: TensorToJson) -> None:
    """Raise GatewayError (502) unless the tensor had as many elements as its shape says."""
    converter.finish()
    expected = element_count(output.shape)
    if converter.count != expected:
        raise bad_answer(
            f"output '{output.name}' of the server's answer holds {converter.count} elements, "
            f"its shape {list(output.shape)} takes {expected}"
        )


def _mark_base64(fields: Fields, outputs: tuple[OutputTensor, ...], policies: JsonPolicies) -> None:
    """Say of outputs that become base64 because the request wants them so that they are."""
    if not policies.as_base64:
        return
    for entry, output in zip(fields.get("outputs", ()), outputs, strict=True):
        is_text = output.binary_size is not None and output.datatype.family is Family.TEXT
        if is_text and output.name in policies.as_base64:
            entry["parameters"]["content_type"] = "base64"


def answer_skeleton(fields: Fields, wants_json: list[bool]) -> list[bytes]:
    """Give the JSON around the data of the outputs that become JSON, cut where each data goes."""
    pieces = [b"{"]
    for number, (key, value) in enumerate(fields.items()):
        pieces[-1] += (b"," if number else b"") + orjson.dumps(key) + b":"
        if key == "outputs":
            _outputs_skeleton(value, wants_json, pieces)
        else:
            pieces[-1] += orjson.dumps(value)
    pieces[-1] += b"}"
    return pieces


def _outputs_skeleton(
    outputs: list[dict[str, Any]], wants_json: list[bool], pieces: list[bytes]
) -> None:
    pieces[-1] += b"["
    for index, output in enumerate(outputs):
        if index:
            pieces[-1] += b","
        if not wants_json[index]:
            pieces[-1] += orjson.dumps(output)
            continue
        pieces[-1] += orjson.dumps(_without_binary_size(output))[:-1] + b',"data":['
        pieces.append(b"]}")
    pieces[-1] += b"]"


def _without_binary_size(output: dict[str, Any]) -> dict[str, Any]:
    parameters = {k: v for k, v in output["parameters"].items() if k != "binary_data_size"}
    plain = {k: v for k, v in output.items() if k != "data"}
    if parameters:
        plain["parameters"] = parameters  # in its place
    else:
        del plain["parameters"]
    return plain
