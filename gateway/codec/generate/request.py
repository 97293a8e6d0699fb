"""Reads requests of the generate extension: a model's metadata tells which members are inputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from typing import Any, Final, NamedTuple

from gateway.codec.json.nesting import nests_deeper
from gateway.codec.json.structure_scan import mask_strings
from gateway.errors import ErrorKind, GatewayError, bad_request, shorten
from gateway.protocol.json_errors import describe_value, quote_value
from gateway.protocol.messages import Fields
from gateway.protocol.tensors import ModelMetadata, TensorSpec
from gateway.sizes import QUOTED_NAME

MAX_GENERATE_REQUEST: Final = 16 * 1024 * 1024
"""The most bytes of a request: it is parsed in one call, which takes some 30 ms for long texts."""

_PARAMETERS: Final = "parameters"
_ID: Final = "id"
_INT64_END: Final = 2**63


class GenerateRequest(NamedTuple):
    """A request as read; ``infer_json`` is a JSON infer request with its inputs."""

    id: str | None
    parameters: Fields
    infer_json: bytes


def read_generate_request(
    body: bytes, model: ModelMetadata, header_cap: int, depth_cap: int
) -> GenerateRequest:
    """Read a request for a model.

    A member with the name of an input has its elements: one value, or an array. Any other one is a
    parameter. Both may also be members of ``parameters``. ``header_cap`` limits the bytes that are
    not within strings, ``depth_cap`` the nesting. Raises GatewayError: 400 that names the member,
    413.
    """
    members = _parse(body, header_cap, depth_cap)
    request_id = members.get(_ID)
    if request_id is not None and not isinstance(request_id, str):
        raise bad_request(f"the request's id must be a string, got {describe_value(request_id)}")
    inputs = {spec.name: spec for spec in model.inputs}
    parameters: Fields = {}
    tensors: dict[str, Fields] = {}
    for name, value in _members_of_all(members, inputs):
        if name not in inputs:
            parameters[name] = _check_parameter(name, value)
        elif name in tensors:
            raise bad_request(f"input '{name}' is given twice: also in {_PARAMETERS}")
        else:
            tensors[name] = _make_tensor(inputs[name], value)
    return GenerateRequest(request_id or None, parameters, _dump({"inputs": [*tensors.values()]}))


def _parse(body: bytes, header_cap: int, depth_cap: int) -> dict[str, Any]:
    _check_size(body, header_cap)
    if nests_deeper(body, depth_cap):
        raise bad_request(f"the request's JSON is nested deeper than {depth_cap}")
    try:
        # Unlike orjson, it takes NaN and integers of any size, as the readers of tensors do.
        members = json.loads(body.decode(), object_pairs_hook=_make_object)
    except ValueError as error:
        raise bad_request(f"the request is no JSON: {error}") from None
    if not isinstance(members, dict):
        raise bad_request(f"the request must be a JSON object, got {describe_value(members)}")
    return members


def _check_size(body: bytes, header_cap: int) -> None:
    if len(body) > MAX_GENERATE_REQUEST:
        raise generate_too_large(MAX_GENERATE_REQUEST)
    if len(body) > header_cap:
        _, inside = mask_strings(body)
        outside = len(body) - int(inside.sum(dtype=int))
        if outside > header_cap:
            raise GatewayError(
                ErrorKind.TOO_LARGE,
                f"the request has {outside} bytes of JSON that are not within strings; at most "
                f"{header_cap} are allowed (limits.max_inference_header_bytes)",
            )


def generate_too_large(cap: int) -> GatewayError:
    """Make the error of a request of more than ``cap`` bytes."""
    return GatewayError(
        ErrorKind.TOO_LARGE,
        f"a request to generate for a server over gRPC is buffered, and is larger than {cap} bytes",
    )


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise bad_request(f"the request has the member {quote_value(twice)} twice")
    return members


def _members_of_all(
    members: dict[str, Any], inputs: dict[str, TensorSpec]
) -> Iterator[tuple[str, Any]]:
    """Yield all members, those of ``parameters`` in its place."""
    for name, value in members.items():
        if name != _PARAMETERS:
            yield name, value
        elif name in inputs:
            raise bad_request(
                f"the model has an input '{name}', which no request to generate can name"
            )
        elif isinstance(value, dict):
            yield from value.items()
        else:
            raise bad_request(f"{name} must be an object, got {describe_value(value)}")


def _check_parameter(name: str, value: object) -> bool | int | float | str:
    if isinstance(value, int) and not -_INT64_END <= value < _INT64_END:
        value = _to_float(value)  # as Triton does
    if isinstance(value, bool | int | float | str):
        return value
    raise bad_request(
        f"'{shorten(name, QUOTED_NAME)}' is no input of the model, so it is a parameter: "
        f"it must be true, false, a string or a number, got {describe_value(value)}"
    )


def _to_float(value: int) -> float | None:
    try:
        return float(value)
    except OverflowError:
        return None


def _make_tensor(spec: TensorSpec, value: object) -> Fields:
    data = value if isinstance(value, list) else [value]
    shape = _fill_shape(spec, len(data))
    return {"name": spec.name, "datatype": spec.datatype.name, "shape": shape, "data": data}


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
        raise bad_request(
            f"input '{spec.name}' has {count} elements, which do not fit its shape "
            f"{list(spec.shape)}"
        )
    return shape


def _dump(document: Fields) -> bytes:
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise bad_request(
            "the request has a string with half of a surrogate pair, which is no text"
        ) from None
