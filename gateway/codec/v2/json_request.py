"""Writes infer requests as JSON, for servers that accept JSON only."""

from __future__ import annotations

from dataclasses import replace

from gateway.codec.elements.encode import TensorEncoder, join_text, make_tensor_encoder
from gateway.codec.policies import BytesEncoding, JsonPolicies
from gateway.codec.v2.json_writer import JsonMessageWriter, TensorSplitter, tensor_fields
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
        super().__init__(request.head.inputs, REQUEST)
        self._request = request
        self._policies = policies
        self._splitter = TensorSplitter(request.head.inputs, REQUEST)
        self._is_started = False

    def feed(self, data: bytes | memoryview) -> bytes:
        """Return the text for the next data of the tensors; raises GatewayError (400)."""
        text = [] if self._is_started else [*self.start()]
        self._is_started = True
        text += [join_text(self.encode(piece)) for piece in self._splitter.feed(data)]
        return b"".join(text)

    def finish(self) -> bytes:
        """Return the rest of the text: all of it if there was no data to feed."""
        text = self.feed(b"")
        self._splitter.finish()
        return text

    def _write_fields(self) -> Fields:
        head = self._request.head
        fields: Fields = {} if self._request.id is None else {"id": self._request.id}
        fields["inputs"] = list(map(self._input_fields, head.inputs))
        if head.outputs:
            fields["outputs"] = list(map(self._output_fields, head.outputs))
        if head.parameters:
            fields["parameters"] = head.parameters
        return {**fields, **head.extra}

    def _input_fields(self, tensor: InputTensor) -> Fields:
        fields = tensor_fields(
            tensor.name, tensor.datatype, tensor.shape, tensor.parameters, tensor.extra
        )
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
