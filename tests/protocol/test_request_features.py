from __future__ import annotations

from typing import Any

import pytest

from gateway.protocol.messages import Fields, RequestFeatures
from gateway.protocol.request_features import may_hide_classification
from gateway.protocol.request_header import read_head, read_inputs


def request(of_request: object = None, of_input: object = None, *outputs: dict[str, Any]) -> Fields:
    region: Fields = {"shared_memory_region": "r"}
    entry: Fields = {"name": "x", "datatype": "FP32", "shape": [1], "parameters": {**region}}
    if isinstance(of_input, dict):
        entry["parameters"] = {**region, **of_input}
    fields: Fields = {"inputs": [entry]}
    if of_request is not None:
        fields["parameters"] = of_request
    if outputs:
        fields["outputs"] = [
            {"name": f"y{i}", "parameters": each} for i, each in enumerate(outputs)
        ]
    return fields


def features_of(fields: Fields) -> RequestFeatures:
    return read_head(fields, read_inputs(fields)).features


PLAIN = [
    request(),
    request({"sequence_id": 0, "sequence_start": True, "sequence_end": False}),
    request({"foo": [1], "classification": -1, "shared_memory_region": 1}),
    request(None, {"shared_memory_offset": 4, "shared_memory_byte_size": 8}),
    request(None, None, {"shared_memory_region": "s", "shared_memory_byte_size": 0}),
    request(None, None, {"classification": 0}, {"binary_data": True}),
]

UNSIGNED = "must be an integer of 0 or more"
FAULTS = [
    (request({"sequence_start": 1}), "the request: sequence_start must be true or false, got 1"),
    (request({"sequence_id": -1}), f"the request: sequence_id {UNSIGNED}, or a string, got -1"),
    (
        request(None, {"shared_memory_region": 1}),
        "input 'x': shared_memory_region must be a string",
    ),
    (
        request(None, {"shared_memory_byte_size": "8"}),
        f"input 'x': shared_memory_byte_size {UNSIGNED}, got \"8\"",
    ),
    (request(None, None, {}, {"classification": -1}), f"output 'y1': classification {UNSIGNED}"),
]


@pytest.mark.parametrize("fields", PLAIN)
def test_usual_request_is_plain(fields: Fields) -> None:
    assert features_of(fields).is_plain


@pytest.mark.parametrize(("fields", "fault"), FAULTS)
def test_parameter_of_a_wrong_type_is_an_error(fields: Fields, fault: str) -> None:
    features = features_of(fields)
    assert not features.is_plain
    assert fault in features.error


def test_classified_outputs_are_named() -> None:
    fields = request(None, None, {"classification": 3}, {}, {"classification": 2**63})
    features = features_of(fields)
    assert features.classified_outputs == ("y0", "y2")
    assert not features.error
    assert not features.is_plain


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        (b'{"inputs":[],"outputs":[{"name":"y","parameters":{"classification":1}}]}', True),
        (b'{"parameters":{"cl\\u0061ssification":1}}', True),
        (b'{"inputs":[{"name":"\\n"}]}', False),
    ],
)
def test_text_may_hide_a_classification(text: bytes, hidden: bool) -> None:
    assert may_hide_classification(text) is hidden
