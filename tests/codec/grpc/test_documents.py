from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.codec.grpc.documents import (
    read_request,
    read_response,
    write_request,
    write_response,
)
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.grpc.rpcs import KSERVE_RPCS, RPCS
from tests.codec.grpc.document_messages import document_of, is_map, messages, path_of
from tests.codec.grpc.infer_messages import rewritten
from tests.support.grpc import wire_bytes
from tests.support.grpc.proto_file import message_class
from tests.support.grpc.wire_bytes import field
from tests.support.scale import scaled

LAW = settings(max_examples=scaled(300), deadline=None)


def is_request(message: Any) -> bool:
    return bool(message.DESCRIPTOR.name.endswith("Request"))


def read(rpc: str, message: Any, data: bytes) -> Any:
    """Read a message of a type; a request as path and body."""
    if is_request(message):
        return tuple(read_request(RPCS[rpc], data))
    return read_response(RPCS[rpc], data)


def expected(message: Any) -> Any:
    if not is_request(message):
        return document_of(message)
    path = path_of(message)
    if path.get("repository_name") and path.get("model_name") == "":
        path = {"repository_name": "", "model_name": path["repository_name"]}
    return path, document_of(message)


def write(rpc: str, message: Any, document: Any) -> bytes:
    if is_request(message):
        path, body = document
        return write_request(RPCS[rpc], path, body)
    return write_response(RPCS[rpc], document)


def drop_unset_choices(message: Any) -> None:
    """Remove entries of maps whose value is null in JSON: they are not written."""
    for name in ("parameters", "settings"):
        each = message.DESCRIPTOR.fields_by_name.get(name)
        if each is not None and "Trace" not in message.DESCRIPTOR.name:
            entries = getattr(message, name)
            for key in [
                key for key in entries if entries[key].WhichOneof("parameter_choice") is None
            ]:
                del entries[key]
    if message.DESCRIPTOR.name == "ModelMetadataResponse":
        for tensor in (*message.inputs, *message.outputs):
            drop_unset_choices(tensor)


@LAW
@given(messages(), wire_bytes.messages(), st.integers(0, 2**32))
def test_message_is_read_as_the_runtime_reads_it(
    drawn: tuple[str, Any], unknown: bytes, seed: int
) -> None:
    rpc, message = drawn
    data = message.SerializeToString()
    for form in (data, rewritten(data, seed), unknown + data, data + unknown):
        assert read(rpc, message, form) == expected(message)


@LAW
@given(messages())
def test_json_is_written_as_the_message_it_came_from(drawn: tuple[str, Any]) -> None:
    rpc, message = drawn
    document = read(rpc, message, message.SerializeToString())
    text = json.loads(json.dumps(document))
    found = type(message).FromString(write(rpc, message, text))
    if not is_request(message) or expected(message)[0] == path_of(message):
        drop_unset_choices(message)
        if rpc == "ModelConfig" and not is_request(message):
            message.config.SetInParent()
        if rpc == "RepositoryIndex" and not is_request(message):
            for model in message.models:
                model.state = model.state.removeprefix("State.")
        assert found == message
    assert read(rpc, message, found.SerializeToString()) == expected(found)


def has_unknown(message: Any) -> bool:
    """Tell whether a message has unknown fields: the runtime counts odd entries of maps as such."""
    if len(UnknownFieldSet(message)):
        return True
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        if is_map(descriptor):
            if descriptor.message_type.fields_by_name["value"].message_type is None:
                continue
            parts = value.values()
        else:
            parts = value if descriptor.is_repeated else [value]
        if any(map(has_unknown, parts)):
            return True
    return False


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, Any, bytes]:
    rpc, message = draw(messages())
    return rpc, type(message), draw(wire_bytes.mutated(st.just(message.SerializeToString())))


@LAW
@given(mutated())
def test_broken_message_is_refused_if_the_runtime_refuses_it(
    drawn: tuple[str, Any, bytes],
) -> None:
    rpc, make, data = drawn
    try:
        message = make.FromString(data)
    except DecodeError:
        message = None
    try:
        found = read(rpc, make, data)
    except GatewayError as error:
        kind = ErrorKind.BAD_REQUEST if is_request(make) else ErrorKind.BAD_RESPONSE
        assert error.kind is kind  # noqa: PT017
        assert make.DESCRIPTOR.name in error.message  # noqa: PT017
        assert message is None or "'file:'" in error.message  # noqa: PT017
        return
    assert message is not None
    if not has_unknown(message):
        assert repr(found) == repr(expected(message)) or found == expected(message)


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


@pytest.mark.parametrize("form", ["packed", "not packed", "both"])
def test_packed_and_unpacked_numbers_are_read(form: str) -> None:
    one, other = field(3, b"\x01\x02"), field(3, 3) + field(3, 4)
    data = {"packed": one, "not packed": other, "both": one + other + one}[form]
    found = read_response(RPCS["ModelMetadata"], field(4, data))
    assert (
        found["inputs"][0]["shape"]
        == {
            "packed": [1, 2],
            "not packed": [3, 4],
            "both": [1, 2, 3, 4, 1, 2],
        }[form]
    )
    message = message_class("ModelMetadataResponse").FromString(field(4, data))
    assert list(message.inputs[0].shape) == found["inputs"][0]["shape"]


@pytest.mark.parametrize("value", [2**32 + 5, 2**31 + 5, 2**64 - 5, 2**40, 2**35 - 1])
def test_numbers_of_more_bits_than_their_type_are_cut_as_the_runtime_does(value: int) -> None:
    config = field(4, value)  # int32
    config += field(3, field(1, field(1, value)))  # uint32
    config += field(5, field(2, value) + field(6, value))  # an enumeration and a boolean
    data = field(1, config)
    message = message_class("ModelConfigResponse").FromString(data)
    assert read_response(RPCS["ModelConfig"], data) == expected(message)


def test_fields_of_another_wire_type_are_unknown() -> None:
    data = field(1, 5) + field(2, 6) + field(3, b"p") + field(4, 7)
    found = read_response(RPCS["ModelMetadata"], data)
    assert found == expected(message_class("ModelMetadataResponse").FromString(data))
    assert found["platform"] == "p"


def test_parts_of_a_message_are_merged_and_the_last_of_a_choice_counts() -> None:
    parts = [
        field(6, field(1, field(1, 5))),
        field(6, field(1, field(2, 6)) + field(2, b"")),
        field(6, field(1, field(1, 7))),
    ]
    data = field(1, b"".join(parts))
    message = message_class("ModelStatisticsResponse").FromString(data)
    assert read_response(RPCS["ModelStatistics"], data) == expected(message)
    policies = [field(3, field(1, field(1, 2))), field(3, field(2, b"")), field(3, field(3, b""))]
    for order in (policies, policies[::-1], [*policies, *policies[:1]], policies[:1] * 2):
        data = field(1, b"".join(order))
        message = message_class("ModelConfigResponse").FromString(data)
        assert read_response(RPCS["ModelConfig"], data) == expected(message)
    oldest = [field(4, field(1, 5)), field(4, field(3, 7))]
    for parts in (oldest, [*oldest, field(3, b""), oldest[0]]):
        data = field(1, field(13, b"".join(parts)))
        message = message_class("ModelConfigResponse").FromString(data)
        assert read_response(RPCS["ModelConfig"], data) == expected(message)


def test_of_two_entries_with_a_key_the_last_counts() -> None:
    entries = [(b"k", field(1, b"a")), (b"l", b""), (b"k", field(1, b"b"))]
    data = b"".join(field(1, field(1, key) + field(2, value)) for key, value in entries)
    data += field(1, field(2, field(1, b"no key"))) + field(1, field(1, b"no value"))
    found = read_response(RPCS["TraceSetting"], data)
    assert found == expected(message_class("TraceSettingResponse").FromString(data))
    assert found == {"k": "b", "l": None, "": "no key", "no value": None}
