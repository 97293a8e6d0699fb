"""Writes responses of the generate extension, and the server-sent events that carry them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

import orjson

from gateway.codec.elements.encode import TextChunk, make_tensor_encoder
from gateway.codec.policies import JsonPolicies
from gateway.codec.v2.json_writer import check_element_count
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.messages import Fields, InferResponse, OutputTensor
from gateway.protocol.tensors import element_count
from gateway.sizes import ENCODE_CHUNK

EVENT_START: Final = b"data: "
EVENT_END: Final = b"\n\n"

Data = Sequence[bytes | memoryview]


def write_generate_response(
    response: InferResponse,
    tensors: Sequence[Data],
    policies: JsonPolicies,
    hidden: Mapping[str, object],
) -> Iterator[TextChunk]:
    """Yield the JSON of a response, whose members are in the order of their names.

    They are the id, model and version, the parameters but for ``hidden`` ones, and the outputs. Of
    several with the same name the first counts. An output of one element is written without
    brackets. ``tensors`` are the data of all outputs but those in shared memory. Each piece takes
    one time slice at most. Raises GatewayError: 502 for an invalid response, 406 if a policy
    refuses a value.
    """
    head = response.head
    names: Fields = {"id": response.id, "model_name": head.model, "model_version": head.version}
    members: dict[str, Iterator[TextChunk]] = {
        name: iter((orjson.dumps(value),)) for name, value in names.items() if value is not None
    }
    for name, value in head.parameters.items():
        if name not in hidden:
            members.setdefault(name, iter((orjson.dumps(value),)))
    remaining = iter(tensors)
    for output in head.outputs:
        if output.binary_size is not None:
            members.setdefault(output.name, _write_output(output, next(remaining), policies))
    separator = b"{"
    for name in sorted(members):
        yield separator + orjson.dumps(name) + b":"
        yield from members[name]
        separator = b","
    yield b"}" if members else b"{}"


def write_generate_error(text: str) -> bytes:
    """Write the JSON of an error."""
    return orjson.dumps({"error": text})


def write_event(pieces: Sequence[bytes]) -> bytes:
    """Write JSON as a server-sent event."""
    return b"".join(chain((EVENT_START,), pieces, (EVENT_END,)))


def _write_output(output: OutputTensor, data: Data, policies: JsonPolicies) -> Iterator[TextChunk]:
    label, of_output = RESPONSE.label(output.name), policies.of_output(output.name)
    encoder = make_tensor_encoder(label, output.datatype, of_output)
    is_single = element_count(output.shape) == 1
    if not is_single:
        yield b"["
    for chunk in data:
        for start in range(0, len(chunk), ENCODE_CHUNK):
            yield encoder.feed(chunk[start : start + ENCODE_CHUNK])
    check_element_count(output, encoder, RESPONSE)
    if not is_single:
        yield b"]"
