"""What is refused of messages and of JSON, in which words, and what documents may cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.codec.grpc.documents import (
    MAX_REQUEST_VALUES,
    MAX_RESPONSE_VALUES,
    read_request,
    read_response,
    write_request,
    write_response,
)
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.grpc.rpcs import RPCS
from gateway.protocol.grpc.wire import MAX_GROUP_DEPTH
from tests.support.checks.refused import refused
from tests.support.grpc.wire_bytes import field


@pytest.mark.parametrize(
    ("rpc", "data", "text"),
    [
        ("ModelMetadata", field(1, b"\xff"), ".name: a string that is not UTF-8 at byte 2"),
        (
            *("ModelMetadata", field(4, b"") + field(4, field(3, 1) + field(2, b"\xff"))),
            ".inputs.datatype: a string that is not UTF-8 at byte 8",
        ),
        (
            *("ModelConfig", field(1, field(12, field(1, b"\x08")))),
            ".config.optimization.graph.level: a varint that is cut short at byte 7",
        ),
        (
            *("ModelConfig", field(1, field(14, field(1, b"key") + field(2, field(1, b"\xff"))))),
            ".config.parameters.value.string_value: a string that is not UTF-8 at byte 13",
        ),
        (
            *("ModelConfig", field(1, field(13, field(2, b"a/b")) + field(11, b""))),
            ".config.sequence_batching.control_input: a number of 8 bytes is cut short at byte 7",
        ),
        ("ModelConfig", field(1, field(5, field(4, b"\x80"))), ""),
        (
            *("ModelStatistics", b"\x0a\x05ab"),
            ".model_stats: a value of 5 bytes is cut short: 2 are left at byte 1",
        ),
        (
            *("ServerMetadata", field(1, b"x") + b"\xfa\x01\x05"),
            ": a value of 5 bytes is cut short: 0 are left at byte 5",
        ),
    ],
)
def test_error_of_invalid_protobuf_names_message_and_mostly_field_and_byte(
    rpc: str, data: bytes, text: str
) -> None:
    text = f"the server's response is not valid protobuf: {rpc}Response{text}"
    with refused(ErrorKind.BAD_RESPONSE, text):
        read_response(RPCS[rpc], data)


def test_invalid_request_is_the_clients_fault() -> None:
    text = "the request is not valid protobuf: TraceSettingRequest.settings.key"
    with refused(ErrorKind.BAD_REQUEST, f"{text}: a string that is not UTF-8 at byte 4"):
        read_request(RPCS["TraceSetting"], field(1, field(1, b"\xff")))


@pytest.mark.parametrize(
    ("key", "number", "name"),
    [("file:1/model.py", 3, "string_param"), ("config", 4, "bytes_param")],
)
def test_only_files_of_a_load_are_bytes(key: str, number: int, name: str) -> None:
    entry = field(1, key.encode()) + field(2, field(number, b"YWJj"))
    text = "only parameters whose names begin with 'file:' must have bytes"
    place = f"RepositoryModelLoadRequest.parameters.{key} of the request"
    with refused(ErrorKind.BAD_REQUEST, f"{place} has a {name}; {text}"):
        read_request(RPCS["RepositoryModelLoad"], field(3, entry))


def config(**members: Any) -> dict[str, Any]:
    return {"name": "m", **members}


def direct(value: Any) -> dict[str, Any]:
    return config(sequence_batching={"direct": {"minimum_slot_utilization": value}})


INT32 = "must be an integer from -2147483648 to 2147483647"
INT64 = "must be an integer from -9223372036854775808 to 9223372036854775807"
UINT64 = "must be an integer from 0 to 18446744073709551615"
PRIORITY = "must be one of PRIORITY_DEFAULT, PRIORITY_MAX, PRIORITY_MIN"
FLOAT = "must be a number of the type float"
LOG = "must be a value for one of bool_param, uint32_param, string_param"
TRACE = "must be a string, an array of strings or null"
SLOTS = ".config.sequence_batching.direct.minimum_slot_utilization"


@pytest.mark.parametrize(
    ("rpc", "document", "place", "what"),
    [
        ("ServerMetadata", [], "", "must be an object, got an array"),
        ("ServerMetadata", {"name": 5}, ".name", "must be a string, got 5"),
        ("ServerLive", {"live": 1}, ".live", "must be true or false, got 1"),
        ("ModelConfig", "x", ".config", 'must be an object, got "x"'),
        ("ModelConfig", config(input={}), ".config.input", "must be an array, got an object"),
        (
            *("ModelConfig", config(input=[{}, {"dims": [1, 1.5]}])),
            *(".config.input[1].dims[1]", f"{INT64}, got 1.5"),
        ),
        (
            "ModelConfig",
            config(max_batch_size=True),
            ".config.max_batch_size",
            f"{INT32}, got true",
        ),
        (
            *("ModelConfig", config(max_batch_size=2**31)),
            *(".config.max_batch_size", f"{INT32}, got 2147483648"),
        ),
        (
            *("ModelConfig", config(optimization={"priority": "HIGH"})),
            *(".config.optimization.priority", f'{PRIORITY}, got "HIGH"'),
        ),
        (
            *("ModelConfig", config(version_policy={"latest": {}, "all": {}})),
            *(".config.version_policy", "has both latest and all"),
        ),
        (
            *("ModelConfig", config(dynamic_batching={"priority_queue_policy": {"x": {}}})),
            *(".config.dynamic_batching.priority_queue_policy.x", f'{UINT64}, got "x"'),
        ),
        ("ModelConfig", direct(1e39), SLOTS, f"{FLOAT}, got 1e+39"),
        ("ModelConfig", direct(True), SLOTS, f"{FLOAT}, got true"),
        ("ModelConfig", direct("1"), SLOTS, f'{FLOAT}, got "1"'),
        (
            *("SystemSharedMemoryStatus", [{"name": "a"}, {"key": "b"}]),
            *(".regions[1]", "must have a name"),
        ),
        ("SystemSharedMemoryStatus", {}, ".regions", "must be an array, got an object"),
        ("LogSettings", {"log_info": []}, ".settings.log_info", f"{LOG}, got an array"),
        ("LogSettings", {"log_info": 2**32}, ".settings.log_info", f"{LOG}, got 4294967296"),
        ("TraceSetting", {"trace_rate": 5}, ".settings.trace_rate", f"{TRACE}, got 5"),
        (
            *("TraceSetting", {"trace_level": ["OFF", 1]}),
            *(".settings.trace_level[1]", "must be a string, got 1"),
        ),
    ],
)
def test_error_of_json_names_message_and_field(
    rpc: str, document: Any, place: str, what: str
) -> None:
    with refused(ErrorKind.BAD_RESPONSE, f"{rpc}Response{place} of the server's response {what}"):
        write_response(RPCS[rpc], document)


@pytest.mark.parametrize(
    ("rpc", "body", "place", "what"),
    [
        (
            *("RepositoryModelLoad", {"parameters": {"file:a": "YW!Jj"}}),
            *(".parameters.file:a", 'must be base64, got "YW!Jj"'),
        ),
        (
            *("RepositoryModelLoad", {"parameters": {"config": {}}}),
            ".parameters.config",
            "must be a value for one of bool_param, int64_param, string_param, bytes_param, "
            "got an object",
        ),
        (
            *("CudaSharedMemoryRegister", {"raw_handle": "YQ=="}),
            *(".raw_handle", 'must be an object, got "YQ=="'),
        ),
        (
            *("CudaSharedMemoryRegister", {"raw_handle": {}}),
            *(".raw_handle", "must be base64, got null"),
        ),
        ("SystemSharedMemoryRegister", {"byte_size": -1}, ".byte_size", f"{UINT64}, got -1"),
        ("RepositoryIndex", [], "", "must be an object, got an array"),
    ],
)
def test_invalid_json_of_a_request_is_the_clients_fault(
    rpc: str, body: Any, place: str, what: str
) -> None:
    with refused(ErrorKind.BAD_REQUEST, f"{rpc}Request{place} of the request {what}"):
        write_request(RPCS[rpc], {}, body)


# ------------------------------------------------------------------------------------ limits


def test_number_of_bytes_is_limited() -> None:
    data = field(1, b"x" * 98)
    assert len(read_response(RPCS["ServerMetadata"], data, 100)["name"]) == 98
    text = "the server's response (ServerMetadataResponse) has more than 99 bytes"
    with refused(ErrorKind.BAD_RESPONSE, text):
        read_response(RPCS["ServerMetadata"], data, 99)
    with refused(ErrorKind.TOO_LARGE, "the request (ModelReadyRequest) has more than 99 bytes"):
        read_request(RPCS["ModelReady"], data, 99)


@pytest.mark.parametrize(
    ("rpc", "part", "around"),
    [
        ("ServerMetadata", field(3, b""), bytes),
        ("ServerMetadata", field(99, 1), bytes),
        ("ServerMetadata", b"\xa3\x06" + b"\x08\x01" * 1000 + b"\xa4\x06", bytes),
        ("ModelConfig", field(1, b""), bytes),
        ("ModelMetadata", field(6, b""), bytes),
        ("ModelMetadata", b"\x01", lambda data: field(4, field(3, data))),
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
        read_response(RPCS[rpc], data)


@pytest.mark.parametrize(
    ("rpc", "part"),
    [
        ("RepositoryModelLoad", field(3, field(1, b"k"))),
        ("TraceSetting", field(1, field(1, b"k"))),
        ("TraceSetting", field(1, field(2, field(1, b"") * 100))),
        ("LogSettings", field(1, b"")),
        ("ModelReady", field(9, 1)),
    ],
)
def test_number_of_values_of_a_request_is_smaller(rpc: str, part: bytes) -> None:
    text = f"has more than {MAX_REQUEST_VALUES} fields and values"
    with refused(ErrorKind.TOO_LARGE, f"the request ({rpc}Request) {text}"):
        read_request(RPCS[rpc], part * MAX_REQUEST_VALUES)


def test_statistics_of_a_thousand_models_are_within_the_limits() -> None:
    duration = field(1, 10**6) + field(2, 10**12)
    batch = field(1, 8) + b"".join(field(number, duration) for number in (2, 3, 4))
    model = field(1, b"a_model_with_a_name") + field(2, b"1") + field(3, 10**12)
    model += field(6, b"".join(field(number, duration) for number in range(1, 9)))
    model += field(7, batch) * 2
    found = read_response(RPCS["ModelStatistics"], field(1, model) * 1000)
    assert len(found["model_stats"]) == 1000


def test_depth_of_unknown_groups_is_limited() -> None:
    data = b"\xa3\x06" * (MAX_GROUP_DEPTH + 1) + b"\xa4\x06" * (MAX_GROUP_DEPTH + 1)
    with pytest.raises(GatewayError, match="nested deeper"):
        read_response(RPCS["ServerMetadata"], data)
