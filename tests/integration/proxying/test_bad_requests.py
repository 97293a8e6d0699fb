"""The gateway refuses invalid requests, and no server sees them."""

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.integration.support.client import HEADER_LENGTH, Client, Response
from tests.integration.support.gateway import Gateway, running_gateway
from tests.integration.support.tap import Tap
from tests.integration.triton.server import TritonServer
from tests.support.addresses import free_address

pytestmark = pytest.mark.triton

KIB = 1024
GOOD = b'{"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}'


def send_good(client: Client) -> None:
    response = client.infer("identity_fp32", GOOD)
    assert response.status == 200
    assert response.fields["outputs"][0]["data"] == [1.0, 2.0]


def check_refused(client: Client, tap: Tap, send: Callable[[], Response], status: int = 400) -> str:
    """Check that the gateway refuses by itself, and that the connection goes on to work."""
    send_good(client)
    connection = client.local_port
    tap.forget()
    response = send()
    assert response.status == status, response.body[:1000]
    assert response.headers["Content-Type"] == "application/json"
    message = response.error
    send_good(client)
    assert client.local_port == connection
    assert tap.requests == ["POST /v2/models/identity_fp32/infer"]
    return message


def one_input(datatype: str, shape: str, data: str) -> str:
    return (
        f'{{"inputs": [{{"name": "INPUT0", "datatype": "{datatype}", "shape": {shape}, '
        f'"data": {data}}}]}}'
    )


# Datatype, element, what is wrong with it; each is sent as the second of three elements.
ELEMENTS = [
    ("UINT8", "300", "does not fit UINT8"),
    ("UINT8", "-1", "does not fit UINT8"),
    ("UINT16", "65536", "does not fit UINT16"),
    ("UINT32", "4294967296", "does not fit UINT32"),
    ("UINT64", "-1", "does not fit UINT64"),
    ("UINT64", "18446744073709551616", "does not fit UINT64"),
    ("INT8", "128", "does not fit INT8"),
    ("INT16", "-32769", "does not fit INT16"),
    ("INT32", "-2147483649", "does not fit INT32"),
    ("INT32", "2147483648", "does not fit INT32"),
    ("INT64", "9223372036854775808", "does not fit INT64"),
    ("INT64", "-9223372036854775809", "does not fit INT64"),
    ("INT32", "1.0", "is not an integer"),
    ("INT32", "1e2", "is not an integer"),
    ("INT64", "true", "is not an integer"),
    ("UINT8", '"1"', "is not an integer"),
    ("INT8", "null", "is not an integer"),
    ("INT32", "NaN", "is not an integer"),
    ("BOOL", "1", "is not true or false"),
    ("BOOL", '"true"', "is not true or false"),
    ("BOOL", "null", "is not true or false"),
    ("FP16", "65520", "does not fit FP16"),
    ("BF16", "3.4e38", "does not fit BF16"),
    ("FP32", "1e40", "does not fit FP32"),
    ("FP32", "-1e39", "does not fit FP32"),
    ("FP32", "1e400", "does not fit FP32"),
    ("FP64", "1e400", "does not fit FP64"),
    ("FP64", "-1e309", "does not fit FP64"),
    ("FP32", "true", "is not a number"),
    ("FP32", '"1"', "is not a number"),
    ("FP32", "null", "is not a number"),
    ("FP16", "false", "is not a number"),
    ("FP64", '"NaN"', "is not a number"),
    ("BYTES", "7", "is not a string"),
    ("BYTES", "null", "is not a string"),
    ("BYTES", "false", "is not a string"),
    ("BYTES", r'"\ud83d"', "half of a surrogate pair"),
    ("BYTES", r'"\ude00x"', "half of a surrogate pair"),
    ("FP32", "nan", "is not a JSON value"),
    ("FP32", "+1", "is not a JSON value"),
    ("FP32", "01", "is not a JSON value"),
    ("FP32", ".5", "is not a JSON value"),
    ("FP32", "1.", "is not a JSON value"),
    ("INT32", "0x10", "is not a JSON value"),
    ("BOOL", "True", "is not a JSON value"),
    ("BYTES", '"a\nb"', "is not a JSON value"),
    ("BYTES", r'"\x"', "is not a JSON value"),
]
PLAIN = {"BOOL": "true", "BYTES": '"a"'}


@pytest.mark.parametrize(("datatype", "element", "fault"), ELEMENTS)
def test_element(tapped: Client, tap: Tap, datatype: str, element: str, fault: str) -> None:
    plain = PLAIN.get(datatype, "1")
    body = one_input(datatype, "[3]", f"[{plain}, {element}, {plain}]").encode()
    model = f"identity_{datatype.lower()}"
    message = check_refused(tapped, tap, lambda: tapped.infer(model, body))
    assert message.startswith("input 'INPUT0': ")
    assert f"element 1 ({element})" in message
    assert fault in message


def test_the_index_counts_through_nested_data(tapped: Client, tap: Tap) -> None:
    body = one_input("INT32", "[2, 3]", "[[1, 2, 3], [4, 5, 6.5]]").encode()
    message = check_refused(tapped, tap, lambda: tapped.infer("identity_int32", body))
    assert "'INPUT0'" in message
    assert "element 5 (6.5)" in message


@pytest.mark.parametrize("first", range(2))
def test_the_tensor_is_named(tapped: Client, tap: Tap, first: int) -> None:
    inputs = [
        {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1]},
        {"name": "INPUT1", "datatype": "FP32", "shape": [1], "data": ["x"]},
    ]
    body = json.dumps({"inputs": inputs[:: 1 - 2 * first]}).encode()
    message = check_refused(tapped, tap, lambda: tapped.infer("add", body))
    assert message.startswith("input 'INPUT1': element 0 (\"x\")")


def test_invalid_element_far_into_large_data(tapped: Client, tap: Tap) -> None:
    values = ["0.25"] * 300_000
    values[234_567] = "1e39"
    body = one_input("FP32", "[300000]", f"[{','.join(values)}]").encode()
    message = check_refused(tapped, tap, lambda: tapped.infer("identity_fp32", body))
    assert "element 234567 (1e39) does not fit FP32" in message


def test_invalid_element_with_most_of_the_body_still_to_come(tapped: Client, tap: Tap) -> None:
    """The client has not sent all yet, and may not read before it has."""
    body = one_input("FP32", "[1000001]", f"[null{',0.25' * 1_000_000}]").encode()
    message = check_refused(tapped, tap, lambda: tapped.infer("identity_fp32", body))
    assert "element 0 (null)" in message


def fields(**changes: Any) -> str:
    entry = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1], **changes}
    return json.dumps({"inputs": [{k: v for k, v in entry.items() if v is not None}]})


def request_with(**members: Any) -> str:
    return json.dumps({**json.loads(fields()), **members})


def output_with(**parameters: Any) -> str:
    return request_with(outputs=[{"name": "OUTPUT0", "parameters": parameters}])


# A name for the test, the body, what the message says.
STRUCTURES = [
    ("too few elements", one_input("FP32", "[3]", "[1, 2]"), ["'INPUT0'", "[3] takes 3", "has 2"]),
    ("too many", one_input("FP32", "[1, 1]", "[[1, 2]]"), ["'INPUT0'", "[1, 1] takes 1", "has 2"]),
    ("none", one_input("FP32", "[2]", "[]"), ["'INPUT0'", "[2] takes 2", "has 0"]),
    ("some for an empty shape", one_input("FP32", "[0]", "[1]"), ["[0] takes 0", "has 1"]),
    ("huge shape", one_input("FP32", "[9223372036854775807, 3]", "[1]"), ["'INPUT0'", "has 1"]),
    ("negative shape", one_input("FP32", "[-1]", "[1, 2]"), ["'INPUT0'", "shape [-1]"]),
    ("float shape", one_input("FP32", "[1.0]", "[1]"), ["'INPUT0'", "shape [1.0]"]),
    ("text shape", one_input("FP32", '["1"]', "[1]"), ["'INPUT0'", 'shape ["1"]']),
    ("boolean shape", one_input("FP32", "[true]", "[1]"), ["'INPUT0'", "shape [true]"]),
    ("shape no array", one_input("FP32", "1", "[1]"), ["'INPUT0'", "shape must be an array"]),
    ("no shape", fields(shape=None), ["'INPUT0'", "shape is missing"]),
    (
        "number as data",
        one_input("FP32", "[1]", "1"),
        ["'INPUT0'", "data must be an array", "a number"],
    ),
    (
        "text as data",
        one_input("FP32", "[1]", '"1"'),
        ["'INPUT0'", "data must be an array", "a string"],
    ),
    (
        "null as data",
        one_input("FP32", "[1]", "null"),
        ["'INPUT0'", "data must be an array", "null"],
    ),
    (
        "object as data",
        one_input("FP32", "[1]", "{}"),
        ["'INPUT0'", "data must be an array", "an object"],
    ),
    ("object in data", one_input("FP32", "[1]", "[{}]"), ["INPUT0"]),
    ("two data", fields().replace('"data"', '"data": [2], "data"'), ["'INPUT0'", "more than one"]),
    ("unknown datatype", one_input("FP33", "[1]", "[1]"), ["'INPUT0'", '"FP33"', "FP32"]),
    ("lower-case datatype", one_input("fp32", "[1]", "[1]"), ["'INPUT0'", '"fp32"']),
    ("no datatype", fields(datatype=None), ["'INPUT0'", "datatype is missing"]),
    ("no name", fields(name=None), ["inputs[0]", "name is missing"]),
    ("number as name", fields(name=7), ["inputs[0]", "name", "7"]),
    ("no source", fields(data=None), ["'INPUT0'", "data is missing"]),
    (
        "two sources",
        fields(parameters={"shared_memory_region": "x"}),
        ["'INPUT0'", "exactly one", "data and shared_memory_region"],
    ),
    ("parameters no object", fields(parameters=[]), ["'INPUT0'", "parameters"]),
    (
        "binary size, no header length",
        fields(data=None, parameters={"binary_data_size": 4}),
        [HEADER_LENGTH],
    ),
    ("input no object", '{"inputs": [1]}', ["inputs[0]", "object", "1"]),
    ("inputs no array", '{"inputs": {}}', ["inputs", "array"]),
    ("no inputs", '{"id": "1"}', ["inputs is missing"]),
    ("an array", "[]", ["object"]),
    ("text", '"inputs"', ["object"]),
    ("number as id", request_with(id=7), ["id", "string", "7"]),
    ("null as id", request_with(id=None), ["id", "string", "null"]),
    ("outputs no array", request_with(outputs={}), ["outputs", "array"]),
    ("output no object", request_with(outputs=["OUTPUT0"]), ["outputs[0]", "object"]),
    ("output without name", request_with(outputs=[{}]), ["outputs[0]", "name"]),
    ("text as binary_data", output_with(binary_data="yes"), ["'OUTPUT0'", "binary_data", "yes"]),
    ("number as binary_data", output_with(binary_data=1), ["'OUTPUT0'", "binary_data", "1"]),
    (
        "text as binary_data_output",
        request_with(parameters={"binary_data_output": "yes"}),
        ["binary_data_output", "yes"],
    ),
    ("request's parameters no object", request_with(parameters=[]), ["parameters", "object"]),
    ("cut short", fields()[:-2], ["not valid JSON"]),
    ("cut short in data", fields()[: fields().index("[1]}") + 2], ["'INPUT0'"]),
    ("surplus", fields() + "x", ["not valid JSON"]),
    ("two documents", fields() * 2, ["JSON"]),
    ("no JSON", "nonsense", ["not valid JSON", "nonsense"]),
    ("a space", " ", ["not valid JSON"]),
    ("missing element", one_input("FP32", "[2]", "[1,,2]"), ["'INPUT0'", "near element 1"]),
    ("comma at the end", one_input("FP32", "[1]", "[1,]"), ["'INPUT0'", "near element 0"]),
    ("comma at the start", one_input("FP32", "[1]", "[,1]"), ["'INPUT0'", "near element 0"]),
    ("no comma", one_input("FP32", "[2]", "[1 2]"), ["'INPUT0'"]),
    ("no comma between arrays", one_input("FP32", "[2]", "[[1][2]]"), ["'INPUT0'"]),
    ("strings without comma", one_input("BYTES", "[2]", '["a" "b"]'), ["'INPUT0'"]),
    ("wrong bracket", one_input("FP32", "[1]", "[1}"), ["INPUT0"]),
]


@pytest.mark.parametrize(
    ("body", "said"), [row[1:] for row in STRUCTURES], ids=[row[0] for row in STRUCTURES]
)
def test_structure(tapped: Client, tap: Tap, body: str, said: list[str]) -> None:
    message = check_refused(tapped, tap, lambda: tapped.infer("identity_fp32", body.encode()))
    for words in said:
        assert words in message


@pytest.mark.parametrize("datatype", ["FP32", "INT8", "BOOL", "BYTES"])
@pytest.mark.parametrize("closed", [True, False])
def test_deeply_nested_data_does_not_kill_the_server(
    triton: TritonServer, tapped: Client, tap: Tap, datatype: str, closed: bool
) -> None:
    element = PLAIN.get(datatype, "1")
    data = "[" * 300_000 + element + "]" * 300_000 * closed
    body = one_input(datatype, "[1]", data).encode()
    model = f"identity_{datatype.lower()}"
    message = check_refused(tapped, tap, lambda: tapped.infer(model, body))
    assert "nested deeper than 64" in message
    assert triton.is_alive()


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_deeply_nested_header_does_not_kill_the_server(
    triton: TritonServer, tapped: Client, tap: Tap, opening: str
) -> None:
    closing = "]" if opening == "[" else "}"
    deep = opening * 100_000 + "1" + closing * 100_000
    body = f'{{"parameters": {{"a": {deep}}}, "inputs": []}}'.encode()
    message = check_refused(tapped, tap, lambda: tapped.infer("identity_fp32", body))
    assert message
    assert triton.is_alive()


def test_nesting_up_to_the_cap_is_fine(via_gateway: Client) -> None:
    body = one_input("FP32", "[1]", "[" * 64 + "1" + "]" * 64).encode()
    assert via_gateway.infer("identity_fp32", body).status == 200


def test_an_empty_body(tapped: Client, tap: Tap) -> None:
    message = check_refused(tapped, tap, lambda: tapped.infer("identity_fp32", b""))
    assert "no body" in message


def test_an_empty_chunked_body(tapped: Client, tap: Tap) -> None:
    message = check_refused(tapped, tap, lambda: tapped.infer("identity_fp32", iter([])))
    assert "JSON" in message or "no body" in message


@pytest.mark.parametrize(
    "value", ["xx", "96abc", "-1", "+5", "5.0", "", "1e2", "0x10", "5 5", "5,5", "9" * 30, "\xb2"]
)
def test_a_header_length_that_is_no_number(tapped: Client, tap: Tap, value: str) -> None:
    length = {HEADER_LENGTH: value}
    message = check_refused(tapped, tap, lambda: tapped.infer("identity_fp32", GOOD, length))
    assert HEADER_LENGTH in message


def test_a_header_length_beyond_the_body(tapped: Client, tap: Tap) -> None:
    length = {HEADER_LENGTH: str(len(GOOD) + 1)}
    message = check_refused(tapped, tap, lambda: tapped.infer("identity_fp32", GOOD, length))
    assert f"is {len(GOOD) + 1}" in message
    assert f"{len(GOOD)} bytes" in message


@dataclass(frozen=True)
class BinaryPart:
    """A request of one FP32 input that promises some bytes, and what comes behind its header."""

    shape: list[int]
    promised: int
    data: bytes
    said: list[str]


BINARY = {
    "fewer": BinaryPart([2], 8, b"1234567", ["7 bytes", "8"]),
    "more": BinaryPart([2], 8, b"123456789", ["9 bytes", "8"]),
    "none": BinaryPart([2], 8, b"", ["0 bytes", "8"]),
    "other than the shape": BinaryPart([3], 8, b"12345678", ["'INPUT0'", "is 8", "[3]", "12"]),
    "negative": BinaryPart([2], -8, b"12345678", ["'INPUT0'", "binary_data_size", "-8"]),
    "beyond 64 bits": BinaryPart([2], 2**63, b"12345678", ["'INPUT0'", "binary_data_size"]),
}


@pytest.mark.parametrize("case", BINARY)
def test_a_binary_part_of_another_size(tapped: Client, tap: Tap, case: str) -> None:
    part = BINARY[case]
    size = {"binary_data_size": part.promised}
    header = fields(shape=part.shape, data=None, parameters=size).encode()
    length = {HEADER_LENGTH: str(len(header))}
    message = check_refused(
        tapped, tap, lambda: tapped.infer("identity_fp32", header + part.data, length)
    )
    for words in part.said:
        assert words in message


def test_data_beside_a_binary_size(tapped: Client, tap: Tap) -> None:
    header = fields(parameters={"binary_data_size": 4}).encode()
    length = {HEADER_LENGTH: str(len(header))}
    message = check_refused(
        tapped, tap, lambda: tapped.infer("identity_fp32", header + b"1234", length)
    )
    assert "exactly one" in message
    assert "data and binary_data_size" in message


def inference_count(client: Client, model: str) -> int:
    """Ask how many requests a model has run, well or not."""
    stats = client.get(f"/v2/models/{model}/stats").fields["model_stats"][0]["inference_stats"]
    return int(stats["success"]["count"] + stats["fail"]["count"])


@pytest.mark.parametrize("data", [b"1234567", b"123456789"])
def test_a_chunked_binary_part_of_another_size_is_not_run(
    via_gateway: Client, direct: Client, data: bytes
) -> None:
    """Its length is not known beforehand: the server may see a part, but never a whole request."""
    header = fields(shape=[2], data=None, parameters={"binary_data_size": 8}).encode()
    before = inference_count(direct, "identity_fp32")
    chunks = iter([header, data])
    response = via_gateway.infer("identity_fp32", chunks, {HEADER_LENGTH: str(len(header))})
    assert response.status == 400
    assert "the body" in response.error
    assert inference_count(direct, "identity_fp32") == before
    send_good(via_gateway)


def test_no_invalid_request_is_run_by_the_server(via_gateway: Client, direct: Client) -> None:
    """By the server's own count, for all rows above of one model."""
    before = inference_count(direct, "identity_fp32")
    for _, body, _ in STRUCTURES:
        assert via_gateway.infer("identity_fp32", body.encode()).status == 400
    assert inference_count(direct, "identity_fp32") == before
    send_good(via_gateway)
    assert inference_count(direct, "identity_fp32") == before + 1


# What the server itself refuses: model, body.
SERVER_ERRORS = {
    "unknown model": ("nope", GOOD),
    "unknown version": ("add/versions/9", GOOD),
    "version that is no number": ("add/versions/x", GOOD),
    "unknown input": ("identity_fp32", fields(name="WRONG").encode()),
    "unknown output": ("identity_fp32", request_with(outputs=[{"name": "NOPE"}]).encode()),
    "missing input": ("add", GOOD),
    "no input": ("identity_fp32", b'{"inputs": []}'),
    "another datatype": ("identity_fp32", fields(datatype="FP64").encode()),
    "another rank": ("identity_fp32", fields(shape=[1, 1]).encode()),
    "too large a batch": ("batched_fp32", one_input("FP32", "[9, 4]", str([1] * 36)).encode()),
    "model that fails": ("fails", GOOD),
    "decoupled model": ("stream", one_input("BYTES", "[1]", '["a"]').encode()),
    "unknown region": (
        "identity_fp32",
        fields(
            data=None, parameters={"shared_memory_region": "x", "shared_memory_byte_size": 4}
        ).encode(),
    ),
    "unknown region for an output": (
        "identity_fp32",
        output_with(shared_memory_region="x", shared_memory_byte_size=4).encode(),
    ),
    "parameter of another type": ("identity_fp32", request_with(parameters={"x": []}).encode()),
}


@pytest.mark.parametrize("case", SERVER_ERRORS)
def test_errors_of_the_server_pass(via_gateway: Client, direct: Client, case: str) -> None:
    model, body = SERVER_ERRORS[case]
    send_good(via_gateway)
    connection = via_gateway.local_port
    response, like = via_gateway.infer(model, body), direct.infer(model, body)
    assert like.status >= 400
    assert (response.status, response.reason, response.body) == (
        like.status,
        like.reason,
        like.body,
    )
    for name in ("Content-Type", "Content-Length", HEADER_LENGTH):
        assert response.headers[name] == like.headers[name]
    send_good(via_gateway)
    assert via_gateway.local_port == connection


def test_unknown_members_of_a_request_pass(via_gateway: Client, direct: Client) -> None:
    extra = {"model_name": "other", "more": {"data": 1, "list": [1, {"data": "x"}]}}
    body = request_with(**extra).encode()
    response, like = via_gateway.infer("identity_fp32", body), direct.infer("identity_fp32", body)
    assert (response.status, response.body) == (like.status, like.body)
    assert response.status == 200


def test_parameters_reach_the_model(via_gateway: Client, direct: Client) -> None:
    parameters = {"a": 2**63 - 1, "b": -(2**63), "c": 'é\n"', "d": True, "e": 1.5, "data": "x"}
    body = request_with(parameters=parameters).encode()
    response, like = (client.infer("with_parameters", body) for client in (via_gateway, direct))
    assert json.loads(response.fields["outputs"][0]["data"][0]) == parameters
    assert response.body == like.body


def test_an_output_that_is_not_utf8(via_gateway: Client) -> None:
    body = one_input("BYTES", "[2]", '["a", "b"]').encode()
    response = via_gateway.infer("bad_bytes", body)
    assert response.status == 406
    for words in ("'OUTPUT0'", "element 0", "not UTF-8", "binary", "base64"):
        assert words in response.error


LIMITS = {
    "max_request_bytes": "64KiB",
    "max_inference_header_bytes": "4KiB",
    "max_json_depth": 5,
    "max_buffered_body_bytes": "16KiB",
}


@pytest.fixture(scope="module")
def limited(triton: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("limited")
    with running_gateway(folder, triton.http_url, limits=LIMITS) as gateway:
        yield gateway


@pytest.fixture
def strict(limited: Gateway) -> Iterator[Client]:
    """A connection to a gateway with small limits."""
    with Client(limited.host, limited.port) as client:
        yield client


def padded(size: int) -> bytes:
    return GOOD + b" " * (size - len(GOOD))


@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_over_the_limit(strict: Client, chunked: bool) -> None:
    whole = padded(64 * KIB)
    assert strict.infer("identity_fp32", iter([whole]) if chunked else whole).status == 413
    assert strict.infer("identity_fp32", GOOD).status == 200


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", ["infer", "generate"])
@pytest.mark.parametrize("raw", [False, True])
def test_larger_than_the_limit(strict: Client, chunked: bool, path: str, raw: bool) -> None:
    text = b'{"INPUT0": [' + b"1," * 40_000 + b"1]}"
    body = iter([text]) if chunked else text
    headers = {HEADER_LENGTH: "0"} if raw else {}
    response = strict.send("POST", f"/v2/models/identity_fp32/{path}", body, headers)
    assert response.status == 413
    assert "limits." in response.error
    assert strict.infer("identity_fp32", GOOD).status == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_much_larger_than_the_limit(strict: Client, chunked: bool) -> None:
    """The client reads no response before it has sent all."""
    data = b"1," * 2**19
    text = one_input("FP32", "[2]", "[").removesuffix("}]}").encode()
    body = iter([text, *[data] * 32]) if chunked else text + data * 32
    response = strict.infer("identity_fp32", body)
    assert response.status == 413
    assert "limits.max_request_bytes" in response.error
    assert strict.infer("identity_fp32", GOOD).status == 200


def test_a_client_that_expects_100_continue_gets_it(limited: Gateway) -> None:
    """It asks first whether the body will be taken; RFC 9110, section 10.1.1."""
    with socket.create_connection((limited.host, limited.port), 10) as sock:
        sock.sendall(
            b"POST /v2/models/identity_fp32/infer HTTP/1.1\r\nHost: x\r\n"
            b"Expect: 100-continue\r\nContent-Length: 1000000\r\n\r\n"
        )
        assert sock.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_header_over_the_limit(strict: Client) -> None:
    body = request_with(more="x" * 5000).encode()
    response = strict.infer("identity_fp32", body)
    assert response.status == 413
    assert "limits.max_inference_header_bytes" in response.error
    # The data itself does not count.
    body = one_input("FP32", "[5000]", str([1] * 5000)).encode()
    assert strict.infer("identity_fp32", body).status == 200


def test_deeper_than_the_limit(strict: Client) -> None:
    body = one_input("FP32", "[1]", "[[[[[[1]]]]]]").encode()
    response = strict.infer("identity_fp32", body)
    assert response.status == 400
    assert "nested deeper than 5" in response.error


def test_mixed_response_above_the_limit(strict: Client) -> None:
    """It has to be held: the JSON part, which comes first, is the last to be known."""
    values = [0.5] * 3000
    inputs = [
        {"name": name, "datatype": "FP32", "shape": [3000], "data": values}
        for name in ("INPUT0", "INPUT1")
    ]
    outputs = [{"name": "SUM", "parameters": {"binary_data": True}}, {"name": "DIFFERENCE"}]
    response = strict.infer("add", json.dumps({"inputs": inputs, "outputs": outputs}).encode())
    assert response.status == 502
    assert "limits.max_buffered_body_bytes" in response.error


def test_a_missing_body_times_out(triton: TritonServer, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("impatient")
    with running_gateway(folder, triton.http_url, limits={"idle_timeout": "200ms"}) as gateway:
        with socket.create_connection((gateway.host, gateway.port), 10) as sock:
            sock.sendall(
                b"POST /v2/models/identity_fp32/infer HTTP/1.1\r\nHost: x\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
            response = b""
            while b"limits.idle_timeout" not in response:
                piece = sock.recv(65536)
                assert piece
                response += piece
        assert response.startswith(b"HTTP/1.1 408 ")
        with Client(gateway.host, gateway.port) as client:
            body = one_input("FP32", "[1]", "[1.0]").encode()
            answer_from_slow = client.infer("slow", body)
        assert answer_from_slow.status == 504
        assert "upstream 'server'" in answer_from_slow.error


def test_a_server_that_is_not_there(tmp_path_factory: Any) -> None:
    url = f"http://{free_address()}"
    with (
        running_gateway(tmp_path_factory.mktemp("alone"), url) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        for response in (client.infer("identity_fp32", GOOD), client.get("/v2/health/ready")):
            assert response.status == 503
            assert "upstream " in response.error
            assert url not in response.error
        # A response to HEAD has no body: it would be taken for the next answer.
        assert client.send("HEAD", "/v2/health/ready").status == 503
        assert client.get("/v2/health/ready").status == 503


def test_the_server_still_works_afterwards(
    triton: TritonServer, gateway: Gateway, direct: Client
) -> None:
    assert triton.is_alive()
    assert gateway.is_alive()
    assert direct.get("/v2/health/ready").status == 200
