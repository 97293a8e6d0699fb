"""A model configuration is made of a model's metadata, for servers that have none."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.codec.grpc.documents import read_response, write_model_config
from gateway.errors import ErrorKind
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.grpc.rpcs import RPCS
from tests.support.checks.refused import refused

DATA_TYPES = {name: f"TYPE_{name}" for name in DATATYPES if name != "BYTES"}


def config_of(metadata: Any) -> Any:
    return read_response(RPCS["ModelConfig"], write_model_config(metadata))


def tensor(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def test_config_has_whole_shapes_and_no_batching() -> None:
    metadata = {
        "name": "resnet",
        "versions": None,
        "platform": "onnx",
        "inputs": [tensor("image", "FP32", -1, 224), tensor("label", "BYTES", -1)],
        "outputs": [tensor("scores", "FP16")],
    }
    config = config_of(metadata)
    assert (config["name"], config["platform"], config["max_batch_size"]) == ("resnet", "onnx", 0)
    found = [
        (each["name"], each["data_type"], each["dims"])
        for each in (*config["input"], *config["output"])
    ]
    assert found == [
        ("image", "TYPE_FP32", [-1, 224]),
        ("label", "TYPE_STRING", [-1]),
        ("scores", "TYPE_FP16", []),
    ]
    assert [each["format"] for each in config["input"]] == ["FORMAT_NONE"] * 2


@pytest.mark.parametrize(
    ("datatype", "expected"),
    [*DATA_TYPES.items(), ("BYTES", "TYPE_STRING"), ("FP4", "TYPE_INVALID")],
)
def test_datatype_that_a_client_cannot_know_is_invalid(datatype: str, expected: str) -> None:
    config = config_of({"outputs": [tensor("x", datatype, 1)]})
    assert config["output"][0]["data_type"] == expected


def test_ensemble_promises_no_steps() -> None:
    assert config_of({"platform": "ensemble"})["platform"] == ""


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ([], " of the server's response must be an object, got an array"),
        ({"name": 5}, ".name of the server's response must be a string, got 5"),
        ({"outputs": {}}, ".outputs of the server's response must be an array, got an object"),
    ],
)
def test_error_names_the_member_of_the_metadata(metadata: Any, text: str) -> None:
    with refused(ErrorKind.BAD_RESPONSE, f"ModelMetadataResponse{text}"):
        write_model_config(metadata)
