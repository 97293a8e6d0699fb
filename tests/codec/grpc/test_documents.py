from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.codec.grpc.documents import (
    read_request,
    read_response,
    write_request,
    write_response,
)
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.grpc.rpcs import KSERVE_RPCS, RPCS, Rpc
from tests.codec.grpc.infer_messages import rewritten
from tests.support.grpc import wire_bytes
from tests.support.grpc.proto_file import message_class
from tests.support.grpc.random_messages import fill
from tests.support.grpc.wire_bytes import field
from tests.support.scale import scaled

LAW = settings(max_examples=scaled(300), deadline=None)

Drawn = tuple[Rpc, Any, int]
"""An RPC, a message of it, and a seed."""

RPC_NAMES = [
    # Of these, random messages have files without their prefix, and regions under another name.
    name
    for name in RPCS
    if not name.startswith("RepositoryModel") and not name.endswith("SharedMemoryStatus")
]


@st.composite
def drawn(draw: st.DrawFn, rpcs: Sequence[str], kinds: Sequence[str]) -> Drawn:
    """Generate a message of one of some RPCs."""
    seed = draw(st.integers(0, 2**32))
    rpc = RPCS[draw(st.sampled_from(rpcs))]
    make = message_class(f"{rpc.name}{draw(st.sampled_from(kinds))}")
    return rpc, fill(random.Random(seed), make()), seed


def is_request(message: Any) -> bool:
    return bool(message.DESCRIPTOR.name.endswith("Request"))


def read(rpc: Rpc, message: Any, data: bytes) -> Any:
    """Read a message of a type; a request as path and body."""
    return read_request(rpc, data) if is_request(message) else read_response(rpc, data)


def write(rpc: Rpc, message: Any, document: Any) -> bytes:
    return write_request(rpc, *document) if is_request(message) else write_response(rpc, document)


def without_null(document: Any) -> Any:
    """Drop members that are null: they are not written."""
    if isinstance(document, dict):
        return {key: without_null(each) for key, each in document.items() if each is not None}
    return [*map(without_null, document)] if isinstance(document, list | tuple) else document


@LAW
@given(drawn(RPC_NAMES, ["Request", "Response"]), wire_bytes.messages())
def test_document_is_the_same_for_each_form_of_a_message_and_after_it_was_written(
    drawn: Drawn, unknown: bytes
) -> None:
    rpc, message, seed = drawn
    data = message.SerializeToString()
    document = read(rpc, message, data)
    for form in (rewritten(data, seed), unknown + data, data + unknown):
        assert read(rpc, message, form) == document
    text = json.loads(json.dumps(document))
    written = read(rpc, message, write(rpc, message, text))
    assert without_null(written) == without_null(document)


@LAW
@given(drawn(["ModelConfig", "ModelStatistics", "ServerMetadata"], ["Response"]))
def test_document_is_the_json_of_protobuf_apart_from_the_exceptions(drawn: Drawn) -> None:
    rpc, message, _ = drawn
    document = read_response(rpc, message.SerializeToString())
    if rpc.name == "ModelConfig":
        message.config.SetInParent()
        document = {"config": document}
    for found in (
        json_format.ParseDict(document, type(message)()),
        type(message).FromString(write(rpc, message, document.get("config", document))),
    ):
        assert str(found) == str(message)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[Rpc, Any, bytes]:
    rpc, message, _ = draw(drawn(RPC_NAMES, ["Request", "Response"]))
    return rpc, message, draw(wire_bytes.mutated(st.just(message.SerializeToString())))


@LAW
@given(mutated())
def test_broken_message_is_refused_if_the_runtime_refuses_it(
    drawn: tuple[Rpc, Any, bytes],
) -> None:
    rpc, message, data = drawn
    try:
        type(message).FromString(data)
    except DecodeError:
        with pytest.raises(GatewayError) as refused:
            read(rpc, message, data)
        kind = ErrorKind.BAD_REQUEST if is_request(message) else ErrorKind.BAD_RESPONSE
        assert refused.value.kind is kind
        assert message.DESCRIPTOR.name in refused.value.message
    else:
        read(rpc, message, data)


# ------------------------------------------------------------------- what JSON stands for what


def request(rpc: str, path: dict[str, str], body: Any = None) -> Any:
    return message_class(f"{rpc}Request").FromString(write_request(RPCS[rpc], path, body))


def response(rpc: str, document: Any) -> Any:
    return message_class(f"{rpc}Response").FromString(write_response(RPCS[rpc], document))


def test_null_clears_a_trace_setting_and_an_empty_array_changes_nothing() -> None:
    body = {"trace_rate": None, "trace_level": [], "trace_count": "5", "log_frequency": ["1"]}
    found = request("TraceSetting", {"model_name": "m"}, body)
    assert found.model_name == "m"
    assert {key: list(value.value) for key, value in found.settings.items()} == {
        "trace_rate": [],
        "trace_count": ["5"],
        "log_frequency": ["1"],
    }
    path, settings = read_request(RPCS["TraceSetting"], found.SerializeToString())
    assert path == {"model_name": "m"}
    assert settings == {"trace_rate": None, "trace_count": "5", "log_frequency": "1"}


def test_trace_level_is_always_an_array_in_json() -> None:
    for level, expected_level in ((["OFF"], ["OFF"]), ("OFF", ["OFF"]), (["A", "B"], ["A", "B"])):
        message = response("TraceSetting", {"trace_level": level, "trace_mode": level})
        found = read_response(RPCS["TraceSetting"], message.SerializeToString())
        assert found["trace_level"] == expected_level
        assert found["trace_mode"] == (level if len(expected_level) > 1 else "OFF")


def test_log_settings_have_the_field_of_their_type_and_null_changes_nothing() -> None:
    body = {"log_info": False, "log_verbose_level": 0, "log_format": "", "log_file": None}
    found = request("LogSettings", {}, body).settings
    assert {key: value.WhichOneof("parameter_choice") for key, value in found.items()} == {
        "log_info": "bool_param",
        "log_verbose_level": "uint32_param",
        "log_format": "string_param",
    }


def test_files_of_a_load_are_base64_in_json() -> None:
    body = {"parameters": {"config": "{}", "file:1/m": "AP8=", "flag": True, "number": -1}}
    found = request("RepositoryModelLoad", {"model_name": "m"}, body)
    assert found.model_name == "m"
    assert found.parameters["config"].string_param == "{}"
    assert found.parameters["file:1/m"].bytes_param == b"\x00\xff"
    assert found.parameters["flag"].bool_param is True
    assert found.parameters["number"].int64_param == -1
    path, read_body = read_request(RPCS["RepositoryModelLoad"], found.SerializeToString())
    assert (path, read_body) == ({"repository_name": "", "model_name": "m"}, body)


def test_name_of_a_metadata_parameter_may_look_like_that_of_a_file() -> None:
    document = {"parameters": {"file:x": "text"}}
    found = response("ModelMetadata", document)
    assert found.parameters["file:x"].string_param == "text"
    again = read_response(RPCS["ModelMetadata"], found.SerializeToString())
    assert again["parameters"] == document["parameters"]


def test_load_of_a_kserve_client_names_its_model_first() -> None:
    rpc = KSERVE_RPCS["RepositoryModelLoad"]
    path = {"repository_name": "", "model_name": "m"}
    data = write_request(rpc, path)
    assert data == b"\x0a\x01m"
    assert read_request(RPCS["RepositoryModelLoad"], data) == (path, {})
    named = message_class("RepositoryModelLoadRequest")(repository_name="r", model_name="m")
    found = read_request(RPCS["RepositoryModelLoad"], named.SerializeToString())
    assert found.path == {"repository_name": "r", "model_name": "m"}
    index = message_class("RepositoryIndexRequest")(repository_name="r", ready=True)
    found = read_request(RPCS["RepositoryIndex"], index.SerializeToString())
    assert found == ({"repository_name": "r"}, {"ready": True})


def test_responses_to_loads_are_those_of_kserve_or_empty() -> None:
    for rpc, member in (("RepositoryModelLoad", "load"), ("RepositoryModelUnload", "unload")):
        assert read_response(RPCS[rpc], b"") == {}
        document = {"name": "m", member: True}
        # KServe 0.21 sends these bytes.
        assert write_response(RPCS[rpc], document) == b"\x0a\x01m\x10\x01"
        assert read_response(RPCS[rpc], b"\x0a\x01m\x10\x01") == document


def test_handle_of_a_cuda_region_is_base64_in_an_object() -> None:
    body = {"raw_handle": {"b64": "AP8="}, "device_id": 1, "byte_size": 64}
    found = request("CudaSharedMemoryRegister", {"name": "r"}, body)
    assert (found.name, found.raw_handle, found.device_id) == ("r", b"\x00\xff", 1)
    again = read_request(RPCS["CudaSharedMemoryRegister"], found.SerializeToString())
    assert again == ({"name": "r"}, body)


def test_regions_are_an_array_sorted_by_name() -> None:
    make = message_class("SystemSharedMemoryStatusResponse")
    message = make(regions={name: {"name": name, "byte_size": 1} for name in "cab"})
    found = read_response(RPCS["SystemSharedMemoryStatus"], message.SerializeToString())
    assert [region["name"] for region in found] == ["a", "b", "c"]
    assert response("SystemSharedMemoryStatus", found) == message


def test_integers_of_64_bits_may_be_strings_as_in_the_json_of_protobuf() -> None:
    document = {"name": "m", "inputs": [{"shape": ["-1", 2, "0003"]}]}
    assert list(response("ModelMetadata", document).inputs[0].shape) == [-1, 2, 3]


def test_path_alone_names_what_a_request_is_for() -> None:
    found = request("ModelMetadata", {"name": "m"}, {"name": "other", "version": "2"})
    assert (found.name, found.version) == ("m", "")
    assert request("RepositoryIndex", {}, {"ready": True, "unknown": 1}).ready


def test_members_that_are_null_are_those_that_are_missing() -> None:
    document = {"name": None, "versions": None, "inputs": None, "parameters": None}
    assert response("ModelMetadata", document) == message_class("ModelMetadataResponse")()
    for rpc in RPCS:
        assert write_request(RPCS[rpc], {}) == write_response(RPCS[rpc], None) == b""


def test_numbers_that_are_not_finite_are_strings() -> None:
    config = message_class("ModelConfig")()
    config.sequence_batching.control_input.add().control.add(
        fp32_false_true=[float("nan"), float("inf"), -float("inf"), 0.1]
    )
    metric = config.model_metrics.metric_control.add()
    metric.histogram_options.buckets.extend([float("nan"), float("inf"), 0.1])
    data = field(1, config.SerializeToString())
    found = read_response(RPCS["ModelConfig"], data)
    (control,) = found["sequence_batching"]["control_input"][0]["control"]
    assert control["fp32_false_true"] == ["NaN", "Infinity", "-Infinity", 0.1]
    (metric_found,) = found["model_metrics"]["metric_control"]
    assert metric_found["histogram_options"] == {"buckets": ["NaN", "Infinity", 0.1]}
    again = response("ModelConfig", found)
    assert str(again.config) == str(config)
