"""Upstream form → client form: a binary answer turned into JSON, wholly or output by output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gateway.codec.elements_to_json import TensorToJson, tensor_to_json
from gateway.codec.json_writer import (
    JsonWriter,
    TensorPiece,
    TensorReader,
    check_count,
    skeleton,
)
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
from gateway.protocol.messages import ANSWER, Tensor


def answer_reader(header_size: int) -> TensorReader:
    """Make the reader of a binary answer; ``header_size`` is the JSON part's, in bytes."""
    return TensorReader(header_size, _parse, ANSWER)


def _parse(header: bytes) -> tuple[Fields, tuple[OutputTensor, ...]]:
    fields = parse_answer(header)
    return fields, read_outputs(fields)


class JsonAnswer(JsonWriter):
    """Writes an answer as JSON while it arrives."""

    def __init__(self, header_size: int, policies: JsonPolicies) -> None:
        super().__init__(answer_reader(header_size), ANSWER)
        self._policies = policies

    def _converter_of(self, index: int) -> TensorToJson:
        return output_converter(self._reader.tensors[index], self._policies)

    def _rewritten(self, fields: Fields) -> Fields:
        _mark_base64(fields, self._reader.tensors, self._policies)
        return fields


class MixedAnswer:
    """Holds an answer of which the client wants some outputs as JSON, others in binary form.

    The header, which comes first, holds the JSON outputs: so all is held until they are known.
    ``spool_cap`` is the number of bytes held at most.
    """

    def __init__(
        self, header_size: int, form: AnswerForm, policies: JsonPolicies, spool_cap: int
    ) -> None:
        self._reader = answer_reader(header_size)
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
            output = self._reader.tensors[piece.index]
            if self._form.wants_binary(output.name):
                self._hold(self._binary, piece.data)
            else:
                self._convert(output, piece)

    def finish(self) -> tuple[bytes, list[bytes | memoryview]]:
        """Give the header and the binary tensors behind it."""
        self._reader.finish()
        wants_json = [i in self._texts for i in range(len(self._reader.tensors))]
        fields = self._reader.fields or {}
        _mark_base64(fields, self._reader.tensors, self._policies)
        header_parts = skeleton(fields, ANSWER.tensors, wants_json)
        header: list[bytes | memoryview] = [header_parts[0]]
        for index, text in zip(sorted(self._texts), header_parts[1:], strict=True):
            header += [*self._texts[index], text]
        return b"".join(header), self._binary

    def _convert(self, output: Tensor, piece: TensorPiece) -> None:
        if piece.index not in self._converters:
            self._converters[piece.index] = output_converter(output, self._policies)
            self._texts[piece.index] = []
        converter = self._converters[piece.index]
        self._hold(self._texts[piece.index], converter.feed(piece.data))
        if piece.last:
            check_count(output, converter, ANSWER)

    def _hold(self, where: list[bytes | memoryview], data: bytes | memoryview) -> None:
        where.append(data)
        self.held += len(data)
        if self.held > self._spool_cap:
            raise bad_answer(
                f"an answer of JSON and binary outputs is held, and is larger than "
                f"{self._spool_cap} bytes (limits.spool_bytes); ask for all outputs in one form"
            )


def output_converter(output: Tensor, policies: JsonPolicies) -> TensorToJson:
    """Make the converter of one output to JSON."""
    if output.name in policies.as_base64:
        policies = replace(policies, bytes_as=BytesAs.BASE64)
    return tensor_to_json(ANSWER.label(output.name), output.datatype, policies)


def _mark_base64(fields: Fields, outputs: Sequence[Tensor], policies: JsonPolicies) -> None:
    """Say of outputs that become base64 because the request wants them so that they are."""
    if not policies.as_base64:
        return
    for entry, output in zip(fields.get("outputs", ()), outputs, strict=True):
        is_text = output.binary_size is not None and output.datatype.family is Family.TEXT
        if is_text and output.name in policies.as_base64:
            entry["parameters"]["content_type"] = "base64"
