"""Writes the inference header of requests in binary form, for servers that take it."""

from __future__ import annotations

import orjson

from gateway.codec.v2.json_writer import tensor_fields
from gateway.protocol.messages import (
    Fields,
    InferRequest,
    InferRequestHead,
    InputTensor,
    RequestedOutput,
)

_WANTED: Fields = {"binary_data": True}


def write_binary_header(request: InferRequest, unlisted: tuple[str, ...] = ()) -> bytes:
    """Write the inference header; the data of all inputs follows it.

    It asks for every output in binary. ``unlisted`` are outputs to list if the request lists none,
    for servers that send only listed ones in binary.
    """
    head = request.head
    listed = () if head.outputs else unlisted
    if request.text and not listed:
        return request.text
    text = head.written.get(listed)
    if text is None:
        text = head.written[listed] = _write_without_id(head, listed)
    if request.id is None:
        return text
    return b'{"id":%b,%b' % (orjson.dumps(request.id), text[1:])


def _write_without_id(head: InferRequestHead, unlisted: tuple[str, ...]) -> bytes:
    outputs = head.outputs or tuple(map(RequestedOutput, unlisted))
    fields: Fields = {"inputs": list(map(input_fields, head.inputs))}
    parameters = head.parameters
    if outputs:
        fields["outputs"] = list(map(output_fields, outputs))
    if not head.outputs:
        parameters = {**parameters, "binary_data_output": True}
    if parameters:
        fields["parameters"] = parameters
    return orjson.dumps({**fields, **head.extra})


def input_fields(tensor: InputTensor) -> Fields:
    """Return the members of an input whose data, if it has any, follow the header."""
    parameters = tensor.parameters
    if tensor.binary_size is not None:
        parameters = {**parameters, "binary_data_size": tensor.binary_size}
    return tensor_fields(tensor, parameters)


def output_fields(output: RequestedOutput) -> Fields:
    """Return the members of an output that is wanted in binary, unless a region is for it."""
    # Explicitly, as servers differ in what ``binary_data_output`` means for listed outputs.
    wanted = {} if "shared_memory_region" in output.parameters else _WANTED
    return {"name": output.name, **output.extra, "parameters": {**output.parameters, **wanted}}
