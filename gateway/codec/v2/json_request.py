"""Writes binary requests as JSON, for servers that accept JSON only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import orjson

from gateway.codec.elements.encode import TensorEncoder, make_tensor_encoder
from gateway.codec.policies import BytesEncoding, JsonPolicies
from gateway.codec.v2.json_writer import JsonMessageWriter, TensorReader, without_parameter
from gateway.protocol.datatypes import Family
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.request_header import Fields, InputTensor, mark_base64, read_inputs


class JsonRequestConverter(JsonMessageWriter):
    """Writes a binary request as JSON while it arrives.

    ``header_size`` is the size of its JSON part. BYTES inputs get the encoding that the client used
    in JSON (``input_encodings``, by input), else the policy's. An input with a content type of its
    own stays text: the content type tells the server how to read it. Outputs in ``as_base64`` are
    requested as base64.
    """

    def __init__(
        self,
        header_size: int,
        policies: JsonPolicies,
        input_encodings: Mapping[int, BytesEncoding],
        as_base64: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(TensorReader(header_size, _parse, REQUEST), REQUEST)
        self._policies = policies
        self._written_as = input_encodings
        self._as_base64 = as_base64
        self._encodings: list[BytesEncoding] = []

    def _rewrite_fields(self, fields: Fields) -> Fields:
        inputs = fields["inputs"]
        self._encodings = [
            self._bytes_encoding_of(index, entry) for index, entry in enumerate(inputs)
        ]
        for entry, tensor, form in zip(inputs, self._reader.tensors, self._encodings, strict=True):
            is_text = tensor.datatype.family is Family.TEXT and tensor.binary_size is not None
            if is_text and form is BytesEncoding.BASE64:
                mark_base64(entry)
        if "outputs" in fields:
            outputs = [without_parameter(entry, "binary_data") for entry in fields["outputs"]]
            for output in outputs:
                if output["name"] in self._as_base64:
                    mark_base64(output)
            fields = {**fields, "outputs": outputs}
        return without_parameter(fields, "binary_data_output")

    def _bytes_encoding_of(self, index: int, entry: Fields) -> BytesEncoding:
        if index in self._written_as:
            return self._written_as[index]
        has_type = "content_type" in entry.get("parameters", {})
        return BytesEncoding.UTF8 if has_type else self._policies.bytes_encoding

    def _make_encoder(self, index: int) -> TensorEncoder:
        tensor = self._reader.tensors[index]
        policies = replace(self._policies, bytes_encoding=self._encodings[index])
        return make_tensor_encoder(REQUEST.label(tensor.name), tensor.datatype, policies, REQUEST)


def _parse(header: bytes) -> tuple[Fields, tuple[InputTensor, ...]]:
    """Parse a header that was checked before."""
    fields: Fields = orjson.loads(header)
    return fields, read_inputs(fields, len(fields["inputs"]))
