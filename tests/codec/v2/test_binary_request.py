from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.codec.v2.binary_request import write_binary_header
from gateway.codec.v2.request import read_without_data
from gateway.protocol.messages import InferRequest

Fields = dict[str, Any]

INPUT = {"name": "x", "shape": [2], "datatype": "INT8", "parameters": {"binary_data_size": 2}}
ON, OFF = {"binary_data": True}, {"binary_data": False}
DEFAULT_ON, DEFAULT_OFF = {"binary_data_output": True}, {"binary_data_output": False}
BASE64 = {"content_type": "base64"}


def outputs(*parameters: Fields | None) -> list[Fields]:
    return [
        {"name": f"out{i}"} | ({} if p is None else {"parameters": dict(p)})
        for i, p in enumerate(parameters)
    ]


def read(text: bytes) -> InferRequest:
    request = read_without_data(text, 64)
    assert request is not None
    return request


def rewritten(fields: Fields, *unlisted: str) -> Fields:
    """Read a header and write it anew."""
    text = json.dumps({**fields, "inputs": [INPUT]}).encode()
    found: Fields = json.loads(write_binary_header(read(text), unlisted))
    assert found.pop("inputs") == [INPUT]
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"parameters": DEFAULT_ON}),
        (
            {"outputs": outputs({"classification": 3})},
            {"outputs": outputs({"classification": 3, "binary_data": True})},
        ),
        (
            {"outputs": outputs({"shared_memory_region": "r"}, OFF)},
            {"outputs": outputs({"shared_memory_region": "r"}, ON)},
        ),
        # The gateway encodes base64 itself.
        ({"outputs": outputs(BASE64, OFF | BASE64)}, {"outputs": outputs(ON, ON)}),
    ],
)
def test_every_output_is_requested_in_binary(before: Fields, after: Fields) -> None:
    assert rewritten(before) == after


@pytest.mark.parametrize("listed", [{}, {"outputs": []}, {"parameters": DEFAULT_ON}])
def test_outputs_are_listed_in_a_request_without_any(listed: Fields) -> None:
    assert rewritten(listed, "A", "B") == {
        "outputs": [{"name": "A", "parameters": ON}, {"name": "B", "parameters": ON}],
        "parameters": DEFAULT_ON,
    }


def test_outputs_of_the_client_stay_the_only_ones() -> None:
    assert rewritten({"outputs": outputs(ON)}, "A") == {"outputs": outputs(ON)}


@pytest.mark.parametrize("form", [{}, {"parameters": DEFAULT_ON}])
def test_each_request_has_its_own_id(form: Fields) -> None:
    for request_id in ("", "a", "b", "\u00e9", 'a"b', None):
        fields = {"inputs": [INPUT], **form}
        if request_id is not None:
            fields["id"] = request_id
        request = read_without_data(json.dumps(fields, ensure_ascii=False).encode(), 64)
        if request is not None:
            assert request.id == request_id
            assert json.loads(write_binary_header(request)).get("id") == request_id


@pytest.mark.parametrize(
    "fields",
    [
        {"parameters": {"id": "a"}},
        {"parameters": {"id": "a"}, "id": "b"},
        {"x": {"y": "id", "id": "a"}},
    ],
)
def test_other_members_named_id_stay(fields: Fields) -> None:
    parameters = {**fields.get("parameters", {}), **DEFAULT_ON}
    assert rewritten(fields) == {**fields, "parameters": parameters}
