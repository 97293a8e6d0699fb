"""A reference implementation of the V1 codec: the whole body at once, with `json` and numpy."""

from __future__ import annotations

import base64
import binascii
import json
import math
from dataclasses import dataclass
from typing import Any, cast

from tests.codec.reference import BareToken, Fields, RefusedError, check, pack, pack_bytes, unpack


@dataclass(frozen=True)
class PlainPredict:
    """The inputs by name, each as its shape and its bytes, and everything else that counts."""

    inputs: dict[str, tuple[list[int], bytes]]
    form: str
    single: bool
    parameters: Fields


Declared = dict[str, tuple[str, list[int]]]
"""The datatypes and shapes of a model's inputs, by name."""


def convert_predict(body: bytes, declared: Declared, batching: bool = False) -> PlainPredict:
    """Convert a request; raises RefusedError."""
    fields = _parse(body)
    check(isinstance(fields, dict), "not an object")
    forms = [form for form in ("instances", "inputs") if form in fields]
    check(len(forms) == 1, "not one of the two")
    form = forms[0]
    check(fields.get("signature_name", "") in ("", "serving_default"), "signature")
    parameters = fields.get("parameters")
    check(parameters is None or isinstance(parameters, dict), "parameters")
    columns = _columns(fields[form], form, declared)
    check(columns.keys() == declared.keys(), "not the inputs")
    found = {name: _tensor(columns[name], declared[name][0]) for name in declared}
    single = False
    inputs = {}
    for name, (shape, data) in found.items():
        wanted = declared[name][1]
        if not _fits(wanted, shape):
            alone = form == "instances" and not batching and wanted[:1] != [-1]
            check(alone and shape[0] == 1 and _fits(wanted, shape[1:]), "shape")
            single = True
            shape = shape[1:]
        inputs[name] = (shape, data)
    return PlainPredict(inputs, form, single, dict(parameters or {}))


def _parse(body: bytes) -> Any:
    def to_dict(pairs: list[tuple[str, Any]]) -> Fields:
        keys = [key for key, _ in pairs]
        check(len(keys) == len(set(keys)), "a key is given twice")
        return dict(pairs)

    def to_float(digits: str) -> float:
        check(math.isfinite(float(digits)), "too large for any datatype")
        return float(digits)

    try:
        return json.loads(
            body.decode("utf-8"),
            parse_float=to_float,
            parse_constant=BareToken,
            object_pairs_hook=to_dict,
        )
    except (ValueError, RecursionError) as error:
        raise RefusedError(str(error)) from None


def _columns(value: Any, form: str, declared: Declared) -> Fields:
    if form == "instances":
        check(isinstance(value, list) and value != [], "no instances")
        if isinstance(value[0], dict) and not _is_base64(value[0], declared):
            rows = cast("list[Fields]", value)
            check(all(isinstance(row, dict) for row in rows), "not an object")
            check(all(row.keys() == declared.keys() for row in rows), "not the inputs")
            return {name: [row[name] for row in rows] for name in declared}
    elif isinstance(value, dict) and not _is_base64(value, declared):
        return value
    check(len(declared) == 1, "which input?")
    return dict.fromkeys(declared, value)


def _is_base64(value: Fields, declared: Declared) -> bool:
    return len(declared) == 1 and "b64" not in declared and list(value) == ["b64"]


def _tensor(value: Any, datatype: str) -> tuple[list[int], bytes]:
    shape = _shape(value)
    elements = _flat(value)
    if datatype == "BYTES":
        return shape, pack_bytes([_bytes(each) for each in elements])
    return shape, pack(datatype, elements)


def _shape(value: Any) -> list[int]:
    if not isinstance(value, list):
        return []
    shapes = [_shape(each) for each in value]
    check(all(shape == shapes[0] for shape in shapes), "ragged")
    return [len(value), *(shapes[0] if shapes else [])]


def _flat(value: Any) -> list[Any]:
    if not isinstance(value, list):
        return [value]
    return [element for each in value for element in _flat(each)]


def _bytes(value: Any) -> bytes:
    if isinstance(value, dict):
        text = value.get("b64")
        check(len(value) == 1 and isinstance(text, str), "not base64")
        try:
            encoded = cast("str", text).encode()
            return binascii.a2b_base64(encoded + b"=" * (-len(encoded) % 4), strict_mode=True)
        except ValueError as error:
            raise RefusedError(str(error)) from None
    check(isinstance(value, str), "not a string")
    try:
        return cast("str", value).encode()
    except UnicodeEncodeError:
        raise RefusedError("half a surrogate pair") from None


def _fits(declared: list[int], shape: list[int]) -> bool:
    return len(declared) == len(shape) and all(
        a in (-1, b) for a, b in zip(declared, shape, strict=True)
    )


# ---------------------------------------------------------------------------------- responses


def predictions(
    body: bytes, header_size: int, form: str, single: bool, as_base64: bool = False
) -> Fields:
    """Return the V1 response for a valid infer response."""
    rest = body[header_size:]
    columns = {}
    for output in json.loads(body[:header_size])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        data, rest = rest[:size], rest[size:]
        encoded = as_base64 or output["name"].endswith("_bytes")
        values = [_told(each, encoded) for each in unpack(output["datatype"], data)]
        shape = [1, *output["shape"]] if single else output["shape"]
        columns[output["name"]] = _nested(values, shape)
    key = {"instances": "predictions", "inputs": "outputs"}[form]
    if len(columns) == 1:
        return {key: next(iter(columns.values()))}
    if form == "inputs":
        return {key: columns}
    rows = zip(*columns.values(), strict=True)
    return {key: [dict(zip(columns, row, strict=True)) for row in rows]}


def _told(value: Any, encoded: bool) -> Any:
    if not isinstance(value, bytes):
        return value
    return {"b64": base64.b64encode(value).decode()} if encoded else value.decode()


def _nested(values: list[Any], shape: list[int]) -> Any:
    if not shape:
        (value,) = values
        return value
    size = math.prod(shape[1:])
    return [_nested(values[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]
