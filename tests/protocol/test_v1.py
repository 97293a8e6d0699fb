from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.messages import OutputTensor
from gateway.protocol.tensors import ModelMetadata, TensorSpec
from gateway.protocol.v1 import (
    V1Format,
    V1ResponseLayout,
    check_fields,
    check_shape,
    error_document,
    is_base64_output,
    models_document,
    reports_ready,
    unseen_models,
    write_entries,
)
from tests.support.checks.refused import refused_with


@pytest.mark.parametrize(
    ("declared", "found", "form", "batching", "single"),
    [
        ((-1, 3), (2, 3), V1Format.ROWS, True, False),
        ((-1, 3), (0, 3), V1Format.COLUMNS, False, False),
        ((3,), (1, 3), V1Format.ROWS, False, True),
        ((3,), (1, 3), V1Format.COLUMNS, False, None),
        ((3,), (2, 3), V1Format.ROWS, False, None),
        ((-1, 3), (2, 4), V1Format.ROWS, True, None),
    ],
)
def test_shape_is_checked_against_the_model(
    declared: tuple[int, ...],
    found: tuple[int, ...],
    form: V1Format,
    batching: bool,
    single: bool | None,
) -> None:
    tensor = TensorSpec("x", DATATYPES["FP32"], declared)
    model = ModelMetadata("m", (tensor,), batching)
    if single is not None:
        assert check_shape(model, tensor, found, form) == V1ResponseLayout(form, single)
        return
    with pytest.raises(GatewayError) as caught:
        check_shape(model, tensor, found, form)
    assert caught.value.kind is ErrorKind.BAD_REQUEST
    for part in ("'x'", "'m'", str(list(declared)), str(list(found))):
        assert part in caught.value.message


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [
        ({}, {}),
        ({"signature_name": "serving_default", "parameters": None}, {}),
        ({"parameters": {"a": 1}}, {"a": 1}),
    ],
)
def test_parameters_are_read(fields: dict[str, Any], parameters: Any) -> None:
    assert check_fields(fields) == parameters


@pytest.mark.parametrize(
    "fields",
    [{"signature_name": "x"}, {"signature_name": None}, {"parameters": 1}, {"parameters": []}],
)
def test_invalid_fields_are_refused(fields: dict[str, Any]) -> None:
    with refused_with(ErrorKind.BAD_REQUEST, next(iter(fields))):
        check_fields(fields)


@pytest.mark.parametrize(
    ("name", "datatype", "expected"),
    [("image_bytes", "BYTES", True), ("image", "BYTES", False), ("n_bytes", "INT64", False)],
)
def test_bytes_outputs_with_the_suffix_are_base64(name: str, datatype: str, expected: bool) -> None:
    assert is_base64_output(OutputTensor(name, DATATYPES[datatype], (1,), 4)) is expected


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"error": "no such model",\n "code": 5}', b'{"error": "no such model",\n "code": 5}'),
        (b'{"error":{"message":"no","code":5}}', b'{"error":"no"}'),
        (b"<html><body>Bad Gateway</body></html>", b'{"error":"Bad Gateway"}'),
        (b"", b'{"error":"Bad Request"}'),
        (b"x" * 5000, b'{"error":"' + b"x" * 1000 + b'"}'),
    ],
)
def test_errors_are_written_for_v1_clients(body: bytes, told: bytes) -> None:
    assert error_document(body, "Bad Request") == told


@pytest.mark.parametrize(
    ("body", "expected"),
    [(b"", True), (b'{"ready":true}', True), (b"OK", True), (b'{"ready":false}', False)],
)
def test_readiness_is_read_from_the_body(body: bytes, expected: bool) -> None:
    assert reports_ready(body) is expected


def test_each_model_is_listed_once() -> None:
    assert models_document(["b", "a", "b"]) == b'{"models":["b","a"]}'


def test_models_are_listed_once_by_name_and_version() -> None:
    seen: set[tuple[str, str]] = set()
    first, second, other = (
        {"name": "a", "version": "1"},
        {"name": "a", "version": "2"},
        {"name": "b"},
    )
    assert unseen_models([first, second, first], seen) == [first, second]
    assert unseen_models([other, second], seen) == [other]
    assert unseen_models({"models": ["b", "c"]}, seen) == [{"name": "c"}]


def test_entries_are_written_with_labels() -> None:
    assert write_entries([{"name": "a"}, {"name": "b", "at": "x"}], at="y") == (
        b'{"name":"a","at":"y"},{"name":"b","at":"y"}'
    )
    assert write_entries([], at="y") == b""


@pytest.mark.parametrize("entries", [{}, "", ["a"], None])
def test_what_is_no_list_of_entries_is_refused(entries: object) -> None:
    with pytest.raises(TypeError):
        write_entries(entries, at="y")
