from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.codec.grpc.document_form import CHOICES, FIELDS, TRACE_VALUES
from gateway.codec.grpc.documents import (
    MAX_REQUEST_VALUES,
    MAX_RESPONSE_VALUES,
    read_request,
    read_response,
    write_model_config,
    write_request,
    write_response,
)
from gateway.errors import ErrorKind
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.grpc.descriptors import POOL
from gateway.protocol.grpc.rpcs import PACKAGE, RPCS
from gateway.protocol.grpc.wire import MAX_GROUP_DEPTH
from tests.codec.grpc.infer_messages import rewritten
from tests.support.checks.refused import refused, refused_with
from tests.support.grpc import wire_bytes
from tests.support.grpc.proto_file import message_class
from tests.support.grpc.random_messages import fill
from tests.support.grpc.wire_bytes import field
from tests.support.scale import scaled

LAW = settings(max_examples=scaled(300), deadline=None)

Drawn = tuple[str, Any, int]
"""An RPC, a message of it, and a seed."""

RPC_NAMES = [
    # Of these, random messages have files without their prefix, and regions under another name.
    name
    for name in sorted(RPCS)
    if not name.startswith("RepositoryModel") and not name.endswith("SharedMemoryStatus")
]


@st.composite
def drawn(draw: st.DrawFn, rpcs: Sequence[str], kinds: Sequence[str]) -> Drawn:
    """Generate a message of one of some RPCs."""
    seed = draw(st.integers(0, 2**32))
    rpc = draw(st.sampled_from(rpcs))
    make = message_class(f"{rpc}{draw(st.sampled_from(kinds))}")
    message = fill(random.Random(seed), make())
    if rpc == "ModelConfig" and not is_request(message):
        message.config.SetInParent()  # its JSON cannot tell that there is none
    return rpc, message, seed


def is_request(message: Any) -> bool:
    return bool(message.DESCRIPTOR.name.endswith("Request"))


def read(rpc: str, message: Any, data: bytes) -> Any:
    """Read a message of a type; a request as path and body."""
    return read_request(rpc, data) if is_request(message) else read_response(rpc, data)


def write(rpc: str, message: Any, document: Any) -> bytes:
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
    if rpc == "ModelConfig":
        document = {"config": document}
    for found in (
        json_format.ParseDict(document, type(message)()),
        type(message).FromString(write(rpc, message, document.get("config", document))),
    ):
        assert str(found) == str(message)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, Any, bytes]:
    rpc, message, _ = draw(drawn(RPC_NAMES, ["Request", "Response"]))
    return rpc, message, draw(wire_bytes.mutated(st.just(message.SerializeToString())))


@LAW
@given(mutated())
def test_broken_message_is_refused_if_the_runtime_refuses_it(drawn: tuple[str, Any, bytes]) -> None:
    rpc, message, data = drawn
    try:
        type(message).FromString(data)
    except DecodeError:
        kind = ErrorKind.BAD_REQUEST if is_request(message) else ErrorKind.BAD_RESPONSE
        with refused_with(kind, message.DESCRIPTOR.name):
            read(rpc, message, data)
    else:
        read(rpc, message, data)


# ------------------------------------------------------------------- what JSON stands for what


def request(rpc: str, path: dict[str, str], body: Any = None) -> Any:
    return message_class(f"{rpc}Request").FromString(write_request(rpc, path, body))


def response(rpc: str, document: Any) -> Any:
    return message_class(f"{rpc}Response").FromString(write_response(rpc, document))


def test_null_clears_a_trace_setting_and_an_empty_array_changes_nothing() -> None:
    body = {"trace_rate": None, "trace_level": [], "trace_count": "5", "log_frequency": ["1"]}
    found = request("TraceSetting", {"model_name": "m"}, body)
    assert found.model_name == "m"
    assert {key: list(value.value) for key, value in found.settings.items()} == {
        "trace_rate": [],
        "trace_count": ["5"],
        "log_frequency": ["1"],
    }
    path, settings = read_request("TraceSetting", found.SerializeToString())
    assert path == {"model_name": "m"}
    assert settings == {"trace_rate": None, "trace_count": "5", "log_frequency": "1"}


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
    path, read_body = read_request("RepositoryModelLoad", found.SerializeToString())
    assert (path, read_body) == ({"repository_name": "", "model_name": "m"}, body)


def test_load_of_a_kserve_client_names_its_model_first() -> None:
    rpc = "RepositoryModelLoad"
    path = {"repository_name": "", "model_name": "m"}
    data = write_request(rpc, path, loads_by_first_field=True)
    assert data == b"\x0a\x01m"
    assert read_request("RepositoryModelLoad", data) == (path, {})
    named = message_class("RepositoryModelLoadRequest")(repository_name="r", model_name="m")
    found = read_request("RepositoryModelLoad", named.SerializeToString())
    assert found == ({"repository_name": "r", "model_name": "m"}, {})
    index = message_class("RepositoryIndexRequest")(repository_name="r", ready=True)
    found = read_request("RepositoryIndex", index.SerializeToString())
    assert found == ({"repository_name": "r"}, {"ready": True})


def test_responses_to_loads_are_those_of_kserve_or_empty() -> None:
    for rpc, member in (("RepositoryModelLoad", "load"), ("RepositoryModelUnload", "unload")):
        assert read_response(rpc, b"") == {}
        document = {"name": "m", member: True}
        # KServe 0.21 sends these bytes.
        assert write_response(rpc, document) == b"\x0a\x01m\x10\x01"
        assert read_response(rpc, b"\x0a\x01m\x10\x01") == document


def test_regions_are_an_array_sorted_by_name() -> None:
    make = message_class("SystemSharedMemoryStatusResponse")
    message = make(regions={name: {"name": name, "byte_size": 1} for name in "cab"})
    found = read_response("SystemSharedMemoryStatus", message.SerializeToString())
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
        assert write_request(rpc, {}) == write_response(rpc, None) == b""


def test_numbers_that_are_not_finite_are_strings() -> None:
    config = message_class("ModelConfig")()
    config.sequence_batching.control_input.add().control.add(
        fp32_false_true=[float("nan"), float("inf"), -float("inf"), 0.1]
    )
    metric = config.model_metrics.metric_control.add()
    metric.histogram_options.buckets.extend([float("nan"), float("inf"), 0.1])
    data = field(1, config.SerializeToString())
    found = read_response("ModelConfig", data)
    (control,) = found["sequence_batching"]["control_input"][0]["control"]
    assert control["fp32_false_true"] == ["NaN", "Infinity", "-Infinity", 0.1]
    (metric_found,) = found["model_metrics"]["metric_control"]
    assert metric_found["histogram_options"] == {"buckets": ["NaN", "Infinity", 0.1]}
    again = response("ModelConfig", found)
    assert str(again.config) == str(config)


@pytest.mark.parametrize(
    ("rpc", "data", "text"),
    [
        (
            "ModelMetadata",
            field(4, b"") + field(4, field(3, 1) + field(2, b"\xff")),
            ".inputs.datatype: a string that is not UTF-8 at byte 8",
        ),
        ("ModelConfig", field(1, field(5, field(4, b"\x80"))), ""),
        (
            "ServerMetadata",
            field(1, b"x") + b"\xfa\x01\x05",
            ": a value of 5 bytes is cut short: 0 are left at byte 5",
        ),
    ],
)
def test_error_of_invalid_protobuf_names_message_and_mostly_field_and_byte(
    rpc: str, data: bytes, text: str
) -> None:
    text = f"the server's response is not valid protobuf: {rpc}Response{text}"
    with refused(ErrorKind.BAD_RESPONSE, text):
        read_response(rpc, data)


@pytest.mark.parametrize(
    ("key", "number", "name"),
    [("file:1/model.py", 3, "string_param"), ("config", 4, "bytes_param")],
)
def test_only_files_of_a_load_are_bytes(key: str, number: int, name: str) -> None:
    entry = field(1, key.encode()) + field(2, field(number, b"YWJj"))
    text = "only parameters whose names begin with 'file:' must have bytes"
    place = f"RepositoryModelLoadRequest.parameters.{key} of the request"
    with refused(ErrorKind.BAD_REQUEST, f"{place} has a {name}; {text}"):
        read_request("RepositoryModelLoad", field(3, entry))


def config(**members: Any) -> dict[str, Any]:
    return {"name": "m", **members}


INT32 = "must be an integer from -2147483648 to 2147483647"
INT64 = "must be an integer from -9223372036854775808 to 9223372036854775807"
UINT64 = "must be an integer from 0 to 18446744073709551615"
PRIORITY = "must be one of PRIORITY_DEFAULT, PRIORITY_MAX, PRIORITY_MIN"
LOG = "must be a value for one of bool_param, uint32_param, string_param"
TRACE = "must be a string, an array of strings or null"
PRIORITIES = config(optimization={"priority": "HIGH"})
POLICIES = config(version_policy={"latest": {}, "all": {}})


@pytest.mark.parametrize(
    ("place", "document", "what"),
    [
        ("ServerMetadata.name", {"name": 5}, "must be a string, got 5"),
        ("ServerLive.live", {"live": 1}, "must be true or false, got 1"),
        ("ModelConfig.config.input", config(input={}), "must be an array, got an object"),
        ("ModelConfig.config.input[1].dims[0]", config(input=[{}, {"dims": [1.5]}]), INT64),
        ("ModelConfig.config.max_batch_size", config(max_batch_size=True), f"{INT32}, got true"),
        ("ModelConfig.config.optimization.priority", PRIORITIES, f'{PRIORITY}, got "HIGH"'),
        ("ModelConfig.config.version_policy", POLICIES, "has both latest and all"),
        (
            "ModelConfig.config.sequence_batching.direct.minimum_slot_utilization",
            config(sequence_batching={"direct": {"minimum_slot_utilization": 1e39}}),
            "must be a number of the type float, got 1e+39",
        ),
        ("SystemSharedMemoryStatus.regions[1]", [{"name": "a"}, {}], "must have a name"),
        ("LogSettings.settings.log_info", {"log_info": []}, f"{LOG}, got an array"),
        ("TraceSetting.settings.trace_level[1]", {"trace_level": ["OFF", 1]}, "must be a string"),
        ("TraceSetting.settings.trace_rate", {"trace_rate": 5}, f"{TRACE}, got 5"),
    ],
)
def test_error_of_json_names_message_and_field(place: str, document: Any, what: str) -> None:
    rpc, _, member = place.partition(".")
    text = f"{rpc}Response.{member} of the server's response {what}"
    with refused_with(ErrorKind.BAD_RESPONSE, text):
        write_response(rpc, document)


@pytest.mark.parametrize(
    ("place", "body", "what"),
    [
        (
            "RepositoryModelLoadRequest.parameters.file:a",
            {"parameters": {"file:a": "YW!Jj"}},
            'must be base64, got "YW!Jj"',
        ),
        (
            "CudaSharedMemoryRegisterRequest.raw_handle",
            {"raw_handle": "YQ=="},
            'must be an object, got "YQ=="',
        ),
        ("SystemSharedMemoryRegisterRequest.byte_size", {"byte_size": -1}, f"{UINT64}, got -1"),
    ],
)
def test_invalid_json_of_a_request_is_the_clients_fault(place: str, body: Any, what: str) -> None:
    with refused(ErrorKind.BAD_REQUEST, f"{place} of the request {what}"):
        write_request(place.partition("Request")[0], {}, body)


# ------------------------------------------------------------------------------------ limits


def test_number_of_bytes_is_limited() -> None:
    data = field(1, b"x" * 98)
    assert len(read_response("ServerMetadata", data, 100)["name"]) == 98
    text = "the server's response (ServerMetadataResponse) has more than 99 bytes"
    with refused(ErrorKind.BAD_RESPONSE, text):
        read_response("ServerMetadata", data, 99)
    with refused(ErrorKind.TOO_LARGE, "the request (ModelReadyRequest) has more than 99 bytes"):
        read_request("ModelReady", data, 99)


@pytest.mark.parametrize(
    ("rpc", "part", "around"),
    [
        ("ServerMetadata", field(3, b""), bytes),
        ("ServerMetadata", b"\xa3\x06" + b"\x08\x01" * 1000 + b"\xa4\x06", bytes),
        ("ModelMetadata", field(6, b""), bytes),
        ("ModelMetadata", field(3, 1), lambda data: field(4, data)),
        ("TraceSetting", field(2, field(1, b"")), lambda data: field(1, data)),
    ],
)
def test_number_of_values_is_limited_before_the_message_is_parsed(
    rpc: str, part: bytes, around: Callable[[bytes], bytes]
) -> None:
    data = around(part * (MAX_RESPONSE_VALUES * 4 // len(part))) + b"no protobuf"
    text = f"has more than {MAX_RESPONSE_VALUES} fields and values"
    with refused(ErrorKind.BAD_RESPONSE, f"the server's response ({rpc}Response) {text}"):
        read_response(rpc, data)


@pytest.mark.parametrize(
    ("rpc", "part"), [("TraceSetting", field(1, field(1, b"k"))), ("ModelReady", field(9, 1))]
)
def test_number_of_values_of_a_request_is_smaller(rpc: str, part: bytes) -> None:
    text = f"has more than {MAX_REQUEST_VALUES} fields and values"
    with refused(ErrorKind.TOO_LARGE, f"the request ({rpc}Request) {text}"):
        read_request(rpc, part * MAX_REQUEST_VALUES)


def test_statistics_of_a_thousand_models_are_within_the_limits() -> None:
    duration = field(1, 10**6) + field(2, 10**12)
    batch = field(1, 8) + b"".join(field(number, duration) for number in (2, 3, 4))
    model = field(1, b"a_model_with_a_name") + field(2, b"1") + field(3, 10**12)
    model += field(6, b"".join(field(number, duration) for number in range(1, 9)))
    model += field(7, batch) * 2
    found = read_response("ModelStatistics", field(1, model) * 1000)
    assert len(found["model_stats"]) == 1000


def test_depth_of_unknown_groups_is_limited() -> None:
    data = b"\xa3\x06" * (MAX_GROUP_DEPTH + 1) + b"\xa4\x06" * (MAX_GROUP_DEPTH + 1)
    with refused_with(ErrorKind.BAD_RESPONSE, "nested deeper"):
        read_response("ServerMetadata", data)


DATA_TYPES = {name: f"TYPE_{name}" for name in DATATYPES if name != "BYTES"}


def config_of(metadata: Any) -> Any:
    return read_response("ModelConfig", write_model_config(metadata))


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


def test_error_names_the_member_of_the_metadata() -> None:
    text = "ModelMetadataResponse.name of the server's response must be a string, got 5"
    with refused(ErrorKind.BAD_RESPONSE, text):
        write_model_config({"name": 5})


def test_handle_of_a_cuda_region_is_base64_in_an_object() -> None:
    body = {"raw_handle": {"b64": "AP8="}, "device_id": 1, "byte_size": 64}
    found = request("CudaSharedMemoryRegister", {"name": "r"}, body)
    assert (found.name, found.raw_handle, found.device_id) == ("r", b"\x00\xff", 1)
    again = read_request("CudaSharedMemoryRegister", found.SerializeToString())
    assert again == ({"name": "r"}, body)


def test_exceptions_are_of_messages_and_fields_that_exist() -> None:
    for name in (*CHOICES, *TRACE_VALUES):
        POOL.FindMessageTypeByName(PACKAGE + name)
    for name in FIELDS:
        POOL.FindFieldByName(PACKAGE + name)
