from __future__ import annotations

from typing import Any

import pytest

from gateway.codec.grpc.documents import read_response, write_response
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.grpc.config_from_metadata import make_model_config
from gateway.protocol.grpc.rpcs import RPCS


def tensor(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


METADATA = {
    "name": "resnet",
    "versions": None,
    "platform": "",
    "inputs": [tensor("image", "FP32", -1, 224, 224, 3), tensor("label", "BYTES", -1)],
    "outputs": [tensor("scores", "FP16")],
}


def test_config_has_whole_shapes_and_no_batching() -> None:
    assert make_model_config(METADATA) == {
        "name": "resnet",
        "platform": "",
        "backend": "",
        "max_batch_size": 0,
        "input": [
            {
                "name": "image",
                "data_type": "TYPE_FP32",
                "dims": [-1, 224, 224, 3],
                "format": "FORMAT_NONE",
            },
            {"name": "label", "data_type": "TYPE_STRING", "dims": [-1], "format": "FORMAT_NONE"},
        ],
        "output": [{"name": "scores", "data_type": "TYPE_FP16", "dims": []}],
    }


def test_config_can_be_sent_over_grpc() -> None:
    config = make_model_config(METADATA)
    found = read_response(RPCS["ModelConfig"], write_response(RPCS["ModelConfig"], config))
    assert {name: found[name] for name in ("name", "platform", "backend", "max_batch_size")} == {
        name: config[name] for name in ("name", "platform", "backend", "max_batch_size")
    }
    for key in ("input", "output"):
        for one, other in zip(found[key], config[key], strict=True):
            assert {name: one[name] for name in other} == other


def test_every_datatype_of_the_protocol_has_a_type() -> None:
    inputs = [tensor("x", datatype, 1) for datatype in DATATYPES]
    config = make_model_config({"name": "m", "inputs": inputs})
    found = [each["data_type"] for each in config["input"]]
    assert found == [f"TYPE_{each}".replace("BYTES", "STRING") for each in DATATYPES]
    assert config["output"] == []


def test_unknown_datatype_becomes_the_invalid_type() -> None:
    config = make_model_config({"outputs": [tensor("x", "FP4", 1)]})
    assert config["output"][0]["data_type"] == "TYPE_INVALID"


def test_platform_is_kept_unless_it_promises_steps() -> None:
    assert make_model_config({"platform": "onnx"})["platform"] == "onnx"
    assert make_model_config({"platform": "ensemble"})["platform"] == ""


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"name": 5}, "name of the model's metadata must be a string, got 5"),
        ({"inputs": {}}, "inputs of the model's metadata must be an array, got an object"),
        ({"inputs": ["x"]}, 'inputs[0] of the model\'s metadata must be an object, got "x"'),
        (
            {"outputs": [{}, {"datatype": []}]},
            "outputs[1].datatype of the model's metadata must be a string, got an array",
        ),
        (
            {"inputs": [{"shape": [1, "2"]}]},
            'inputs[0].shape of the model\'s metadata must be an array of integers, got "2"',
        ),
        (
            {"inputs": [{"shape": [True]}]},
            "inputs[0].shape of the model's metadata must be an array of integers, got true",
        ),
    ],
)
def test_error_names_the_member(metadata: dict[str, Any], text: str) -> None:
    with pytest.raises(GatewayError) as caught:
        make_model_config(metadata)
    assert (caught.value.kind, caught.value.message) == (ErrorKind.BAD_RESPONSE, text)
