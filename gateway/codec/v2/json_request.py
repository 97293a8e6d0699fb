"""Writes infer requests as JSON, for servers that accept JSON only."""

from __future__ import annotations

from dataclasses import replace

from gateway.codec.elements.encode import TensorEncoder, make_tensor_encoder
from gateway.codec.policies import BytesEncoding, JsonPolicies
from gateway.codec.v2.json_writer import JsonMessageWriter, TensorReader
from gateway.protocol.datatypes import Family
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.messages import Fields, InferRequest, InputTensor, RequestedOutput
from gateway.protocol.request_header import mark_base64


class JsonRequestWriter(JsonMessageWriter):
    """Writes a request as JSON while the data of its tensors arrives.

    BYTES inputs get the encoding that the client used in JSON, else the policy's. An input with a
    content type of its own stays text: the content type tells the server how to read it.
    """

    def __init__(self, request: InferRequest, policies: JsonPolicies) -> None:
        inputs = request.head.inputs
        super().__init__(TensorReader(0, lambda _: ({}, inputs), REQUEST), REQUEST)
        self._request = request
        self._policies = policies

    def _rewrite_fields(self, fields: Fields) -> Fields:
        head = self._request.head
        if self._request.id is not None:
            fields = {"id": self._request.id}
        fields["inputs"] = list(map(self._input_fields, head.inputs))
        if head.outputs:
            fields["outputs"] = list(map(self._output_fields, head.outputs))
        if head.parameters:
            fields["parameters"] = head.parameters
        return {**fields, **head.extra}

    def _input_fields(self, tensor: InputTensor) -> Fields:
        fields: Fields = {
            "name": tensor.name,
            "shape": tensor.shape,
            "datatype": tensor.datatype.name,
            **tensor.extra,
        }
        if tensor.parameters:
            fields["parameters"] = tensor.parameters
        is_text = tensor.datatype.family is Family.TEXT and tensor.binary_size is not None
        if is_text and self._encoding_of(tensor) is BytesEncoding.BASE64:
            mark_base64(fields)
        return fields

    def _output_fields(self, output: RequestedOutput) -> Fields:
        fields: Fields = {"name": output.name, **output.extra}
        if output.parameters:
            fields["parameters"] = output.parameters
        if output.name in self._request.head.output_encoding.as_base64:
            mark_base64(fields)
        return fields

    def _encoding_of(self, tensor: InputTensor) -> BytesEncoding:
        if tensor.base64 is None and "content_type" not in tensor.parameters:
            return self._policies.bytes_encoding
        return BytesEncoding.BASE64 if tensor.base64 else BytesEncoding.UTF8

    def _make_encoder(self, index: int) -> TensorEncoder:
        tensor = self._request.head.inputs[index]
        policies = replace(self._policies, bytes_encoding=self._encoding_of(tensor))
        return make_tensor_encoder(REQUEST.label(tensor.name), tensor.datatype, policies, REQUEST)
