"""Triton's generate extension: JSON without datatypes and shapes, and server-sent events.

A model's metadata tells which members of a request are inputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from gateway.codec.elements.encode import TextChunk, make_tensor_encoder
from gateway.codec.json.body_checks import NestingCheck
from gateway.codec.policies import JsonPolicies
from gateway.codec.structure_scan import mask_strings
from gateway.codec.v2.json_writer import check_element_count
from gateway.errors import (
    ErrorKind,
    GatewayError,
    ModelMismatchError,
    bad_request,
    replace_surrogates,
    shorten,
)
from gateway.protocol.error_vocabulary import RESPONSE
from gateway.protocol.json_errors import describe_value, quote_value
from gateway.protocol.messages import Fields, InferResponse, OutputTensor
from gateway.protocol.tensors import ModelMetadata, TensorSpec, element_count
from gateway.sizes import ENCODE_CHUNK, QUOTED_NAME, SCAN_WINDOW

MAX_GENERATE_REQUEST: Final = 16 * 1024 * 1024
"""The most bytes of a request: parsed in one call, a long text takes some 3 ms per MiB."""

MAX_OUTSIDE_STRINGS: Final = 256 * 1024
"""The most of them outside of strings: numbers, mostly, take some 10 ms."""

_SPACE: Final = re.compile(r"[ \t\n\r]*")

_PARAMETERS: Final = "parameters"
_ID: Final = "id"
_INT64_END: Final = 2**63


class GenerateRequest(NamedTuple):
    """A request as read; ``infer_json`` is a JSON infer request with its inputs."""

    id: str | None
    parameters: Fields
    infer_json: bytes


class GenerateBodyCheck:
    """Checks a body as it arrives, before it is parsed in one call.

    ``depth_cap`` limits the nesting.
    """

    def __init__(self, depth_cap: int) -> None:
        self._nesting = NestingCheck(depth_cap)
        self._outside = 0
        self._inside = 0  # 1 within a string
        self._carry = b""

    def feed(self, text: bytes | memoryview) -> None:
        """Check the next part; raises GatewayError: 400 for the nesting, 413."""
        self._nesting.feed(text)
        for start in range(0, len(text), SCAN_WINDOW):
            self._count(self._carry + bytes(text[start : start + SCAN_WINDOW]))
        if self._outside > MAX_OUTSIDE_STRINGS:
            raise GatewayError(
                ErrorKind.TOO_LARGE,
                "a request to generate for a server over gRPC may have at most "
                f"{MAX_OUTSIDE_STRINGS} bytes of JSON that are not within strings",
            )

    def _count(self, text: bytes) -> None:
        # A backslash at the end may belong to a quote that follows.
        self._carry = b"\\" * ((len(text) - len(text.rstrip(b"\\"))) % 2)
        text = text[: len(text) - len(self._carry)]
        _, inside = mask_strings(text)
        inside ^= self._inside
        if text:
            self._outside += len(text) - int(np.count_nonzero(inside))
            self._inside = int(inside[-1])


def read_generate_request(body: bytes, model: ModelMetadata) -> GenerateRequest:
    """Read a request for a model, which GenerateBodyCheck has checked.

    A member with the name of an input has its elements: one value, or an array. Any other one is a
    parameter. Both may also be members of ``parameters``. Raises GatewayError (400) that names the
    member.
    """
    try:
        text = body.decode()
        members = _read_object(text, 0)
    except ValueError as error:
        raise bad_request(f"the request is no JSON: {error}") from None
    request_id = next((each.value for each in members if each.name == _ID), None)
    if request_id is not None and not isinstance(request_id, str):
        raise bad_request(f"the request's id must be a string, got {describe_value(request_id)}")
    inputs = {spec.name: spec for spec in model.inputs}
    parameters: Fields = {}
    tensors: dict[str, list[bytes]] = {}
    for member in _with_parameters(text, members, inputs):
        name = member.name
        if name not in inputs:
            parameters[name] = _check_parameter(name, member.value)
        elif name in tensors:
            raise bad_request(f"input '{name}' is given twice: also in {_PARAMETERS}")
        else:
            separator = b"," if tensors else b""
            tensors[name] = [separator, *_write_tensor(inputs[name], member, text)]
    infer_json = [b'{"inputs": [', *chain.from_iterable(tensors.values()), b"]}"]
    return GenerateRequest(request_id or None, parameters, b"".join(infer_json))


class _Member(NamedTuple):
    """A member of an object, with the range of its value in the text."""

    name: str
    value: Any
    start: int
    end: int


def _read_object(text: str, start: int) -> list[_Member]:
    """Read an object, whose end must be that of the text unless it begins within it.

    Raises JSONDecodeError, and GatewayError (400) for another value or a name given twice.
    """
    position = _skip_space(text, start)
    if text[position : position + 1] != "{":
        value = _DECODER.decode(text)
        raise bad_request(f"the request must be a JSON object, got {describe_value(value)}")
    members: list[_Member] = []
    position = _skip_space(text, position + 1)
    ends = text[position : position + 1] == "}"
    while not ends:
        position = _skip_space(text, position)
        _expect(text, position, '"', "a name in double quotes")
        name, position = _DECODER.raw_decode(text, position)
        position = _skip_space(text, position)
        _expect(text, position, ":", "':'")
        position = _skip_space(text, position + 1)
        value, end = _DECODER.raw_decode(text, position)
        members.append(_Member(name, value, position, end))
        position = _skip_space(text, end)
        ends = text[position : position + 1] == "}"
        if not ends:
            _expect(text, position, ",", "',' or '}'")
            position += 1
    if not start and _skip_space(text, position + 1) != len(text):
        raise json.JSONDecodeError("Extra data", text, position + 1)
    _check_names([member.name for member in members])
    return members


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


def _expect(text: str, position: int, mark: str, what: str) -> None:
    if text[position : position + 1] != mark:
        raise json.JSONDecodeError(f"Expecting {what}", text, position)


def generate_too_large(cap: int) -> GatewayError:
    """Make the error of a request of more than ``cap`` bytes."""
    return GatewayError(
        ErrorKind.TOO_LARGE,
        f"a request to generate for a server over gRPC is buffered, and is larger than {cap} bytes",
    )


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _check_names([name for name, _ in pairs])
    return dict(pairs)


def _check_names(names: list[str]) -> None:
    if len(set(names)) != len(names):
        seen = set[str]()
        for name in names:
            if name in seen:
                raise bad_request(f"the request has the member {quote_value(name)} twice")
            seen.add(name)


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_make_object)
"""Unlike orjson, it takes NaN and integers of any size, as the readers of tensors do."""


def _with_parameters(
    text: str, members: list[_Member], inputs: dict[str, TensorSpec]
) -> Iterator[_Member]:
    """Yield all members, those of ``parameters`` in its place."""
    for member in members:
        if member.name != _PARAMETERS:
            yield member
        elif member.name in inputs:
            raise ModelMismatchError(
                f"the model has an input '{member.name}', which no request to generate can name"
            )
        elif isinstance(member.value, dict):
            yield from _read_object(text, member.start)
        else:
            got = describe_value(member.value)
            raise bad_request(f"{member.name} must be an object, got {got}")


def _check_parameter(name: str, value: object) -> bool | int | float | str:
    if isinstance(value, int) and not -_INT64_END <= value < _INT64_END:
        value = _to_float(value)  # as Triton does
    if not isinstance(value, bool | int | float | str):
        raise ModelMismatchError(
            f"'{shorten(name, QUOTED_NAME)}' is no input of the model, so it is a parameter: "
            f"it must be true, false, a string or a number, got {describe_value(value)}"
        )
    for text in (name, value):
        if isinstance(text, str) and replace_surrogates(text) != text:
            raise bad_request(
                f"parameter {quote_value(replace_surrogates(name))} has half of a surrogate pair, "
                "which is no text"
            )
    return value


def _to_float(value: int) -> float | None:
    try:
        return float(value)
    except OverflowError:
        return None


def _write_tensor(spec: TensorSpec, member: _Member, text: str) -> list[bytes]:
    """Write an input of a JSON infer request with the text of a member's value."""
    is_array = isinstance(member.value, list)
    shape = _fill_shape(spec, len(member.value) if is_array else 1)
    start = json.dumps({"name": spec.name, "datatype": spec.datatype.name, "shape": shape})
    data = text[member.start : member.end].encode()
    opening, closing = (b"", b"}") if is_array else (b"[", b"]}")
    return [start[:-1].encode(), b', "data": ', opening, data, closing]


def _fill_shape(spec: TensorSpec, count: int) -> list[int]:
    """Return the shape of an input with ``count`` elements, as Triton chooses it.

    The last variable dimension takes them all; any other one is 1.
    """
    fixed = prod(size for size in spec.shape if size >= 0)
    shape = [1 if size < 0 else size for size in spec.shape]
    variable = [index for index, size in enumerate(spec.shape) if size < 0]
    if fixed and variable:
        shape[variable[-1]], rest = divmod(count, fixed)
        fits = not rest
    else:
        fits = count == fixed
    if not fits:
        raise ModelMismatchError(
            f"input '{spec.name}' has {count} elements, which do not fit its shape "
            f"{list(spec.shape)}"
        )
    return shape


# -------------------------------------------------------------------------------- responses

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
