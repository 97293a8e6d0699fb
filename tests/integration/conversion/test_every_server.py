"""A request in any encoding gets the same tensors from every server.

The gateway finds out what each server is. What a server cannot do, the client is told.
"""

import base64
import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.support.client import HEADER_LENGTH, Client, Response
from tests.integration.support.gateway import Gateway, running_gateway
from tests.integration.support.infer_messages import Request, check_echo, read_outputs, send, tensor
from tests.integration.support.python_server import KServe, MLServer
from tests.integration.support.real_server import Reached, RealServer

SAGEMAKER = "application/vnd.sagemaker-triton.binary+json;json-header-size="
NO_TEXT = b"\xff\x00\xfe"

VALUES: dict[str, list[Any]] = {
    "FP32": [0.1, -2, 3e38],
    "INT64": [2**53 + 1, -(2**63)],
    "BYTES": ["é".encode(), b"", b"a\0b"],
    "BOOL": [True, False],
}


@pytest.fixture(scope="module")
def via_gateway(any_gateway: Gateway) -> Iterator[Client]:
    """A connection to a gateway in front of each of the servers in turn."""
    with Client(any_gateway.host, any_gateway.port) as client:
        yield client


def mixed(binary: Sequence[bool], **wanted: Any) -> Request:
    """Ask for four datatypes; ``binary`` are the forms in which they are sent."""
    inputs = [
        tensor(f"IN_{datatype}", datatype, values, binary=form)
        for (datatype, values), form in zip(VALUES.items(), binary, strict=True)
    ]
    return Request("mixed", tuple(inputs), **wanted)


def check_mixed(response: Response, request: Request, server: Reached) -> None:
    """Check that what comes back is what was sent, in the form that was asked for."""
    sent = {each.name.replace("IN_", "OUT_"): each for each in request.inputs}
    outputs = read_outputs(response)
    asked = set(dict(request.outputs) or sent)
    # OpenVINO's server gives all outputs, whichever are listed.
    given = set(sent) if server.name == "openvino" else asked
    assert sorted(output.name for output in outputs) == sorted(given)
    for output in outputs:
        assert output.name not in asked or output.binary == request.wants_binary(output.name)
        check_echo((output,), sent[output.name])


REQUESTS: dict[str, Request] = {
    "json": mixed([False] * 4),
    "binary": mixed([True] * 4, binary_data_output=True),
    "both to both": mixed(
        [True, False, True, False], outputs=(("OUT_FP32", False), ("OUT_BYTES", True))
    ),
}


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "application/octet-stream"])
def test_content_types_do_not_matter(via_gateway: Client, any_upstream: Reached, kind: str) -> None:
    """curl says of JSON that it is a form, unless it is told to say something else."""
    for request in (REQUESTS["json"], REQUESTS["binary"]):
        check_mixed(send(via_gateway, request, kind), request, any_upstream)


def test_compressed(via_gateway: Client, any_upstream: Reached) -> None:
    request = REQUESTS["both to both"]
    body, headers = request.encoded()
    packed = gzip.compress(body)
    response = via_gateway.infer("mixed", packed, headers | {"Content-Encoding": "gzip"})
    check_mixed(response, request, any_upstream)


def test_sagemaker(via_gateway: Client, any_upstream: Reached) -> None:
    request = REQUESTS["both to both"]
    body, headers = request.encoded()
    kind = SAGEMAKER + headers.pop(HEADER_LENGTH)
    response = via_gateway.infer("mixed", body, {"Content-Type": kind})
    assert HEADER_LENGTH not in response.headers
    said, _, size = response.headers["Content-Type"].partition("json-header-size=")
    assert said + "json-header-size=" == SAGEMAKER
    response.headers[HEADER_LENGTH] = size
    check_mixed(response, request, any_upstream)


@pytest.mark.parametrize(("binary", "wanted"), [(True, False), (False, True)])
def test_half_floats(
    via_gateway: Client, any_upstream: Reached, binary: bool, wanted: bool
) -> None:
    sent = tensor("INPUT0", "FP16", [0.1, -2, 65504], binary=binary)
    response = send(via_gateway, Request("identity_fp16", (sent,), binary_data_output=wanted))
    if any_upstream.name == "openvino":
        # It takes them, and has no form to give them back in.
        assert response.status == 400
        assert "FP16" in response.error
        return
    (output,) = read_outputs(response)
    assert output.binary == wanted
    check_echo((output,), sent)


@pytest.mark.parametrize("binary", [True, False])
def test_nonfinite_values(via_gateway: Client, any_upstream: Reached, binary: bool) -> None:
    sent = tensor("INPUT0", "FP32", [np.nan, np.inf, -np.inf, 1], binary=binary)
    response = send(via_gateway, Request("identity_fp32", (sent,), binary_data_output=binary))
    if any_upstream.name == "mlserver" and any_upstream.over_grpc:
        check_mlserver_over_grpc(response)
    elif any_upstream.name == "mlserver":
        # It reads JSON by the letter; with the route's `nonfinite: string`, see below.
        assert response.status == 422
        assert b"JSON decode error" in response.body
    else:
        check_echo(read_outputs(response), sent)


def check_mlserver_over_grpc(response: Response) -> None:
    """It takes such numbers, and its codec makes nulls of them, which its gRPC form cannot hold."""
    assert (response.status, response.error) == (500, "required argument is not a float")


def in_base64(data: bytes, *, back: bool) -> bytes:
    is_base64 = {"content_type": "base64"}
    text = base64.b64encode(data).decode()
    entry = {"name": "INPUT0", "datatype": "BYTES", "shape": [1], "data": [text]}
    output = {"name": "OUTPUT0", "parameters": is_base64 if back else {"binary_data": True}}
    fields = {"inputs": [{**entry, "parameters": is_base64}], "outputs": [output]}
    return json.dumps(fields).encode()


@pytest.mark.parametrize("back", [True, False], ids=["to base64", "to binary"])
@pytest.mark.parametrize("data", ["é\0".encode(), NO_TEXT], ids=["text", "no text"])
def test_base64(via_gateway: Client, any_upstream: Reached, data: bytes, back: bool) -> None:
    response = via_gateway.infer("identity_bytes", in_base64(data, back=back))
    if data == NO_TEXT and refuses_no_text(any_upstream):
        check_no_text_is_refused(response)
    elif back:
        (entry,) = response.fields["outputs"]
        assert entry["parameters"]["content_type"] == "base64"
        assert (entry["datatype"], entry["shape"]) == ("BYTES", [1])
        assert base64.b64decode(entry["data"][0]) == data
    else:
        check_echo(read_outputs(response), tensor("INPUT0", "BYTES", [data], binary=True))


def test_bytes_that_are_not_utf8(via_gateway: Client, any_upstream: Reached) -> None:
    sent = tensor("INPUT0", "BYTES", [b"a", NO_TEXT], binary=True)
    response = send(via_gateway, Request("identity_bytes", (sent,), binary_data_output=True))
    if refuses_no_text(any_upstream):
        check_no_text_is_refused(response)
    elif any_upstream.name == "mlserver":
        # Which is sent JSON; the error tells the way out.
        assert response.status == 400
        assert "'INPUT0': element 1 is not UTF-8 text" in response.error
        assert "bytes: base64" in response.error
    else:
        check_echo(read_outputs(response), sent)


def refuses_no_text(upstream: Reached) -> bool:
    """KServe takes all BYTES for text over HTTP, MLServer's codec over gRPC."""
    return (upstream.name, upstream.over_grpc) in (("kserve", False), ("mlserver", True))


def check_no_text_is_refused(response: Response) -> None:
    """The server says so itself."""
    assert response.status == 500
    assert "utf-8" in response.error.lower()


PAIR = (tensor("INPUT0", "FP32", [1, 2.5]), tensor("INPUT1", "FP32", [3, 5]))


def test_versions(via_gateway: Client, any_upstream: Reached) -> None:
    response = send(via_gateway, Request("add/versions/1", PAIR))
    if any_upstream.name == "kserve":
        assert response.status == 501
        assert "does not support model versions" in response.error
        assert "/v2/models/add/infer" in response.error
        return
    results = {output.name: output.elements.tolist() for output in read_outputs(response)}
    assert results == {"SUM": [4, 7.5], "DIFFERENCE": [-2, -2.5]}


def test_traces(via_gateway: Client, any_upstream: Reached) -> None:
    response = via_gateway.get("/v2/models/add/trace")
    if any_upstream.name == "triton":
        assert response.status == 200
        assert "trace_level" in response.fields
    else:
        assert response.status == 501
        told = f"upstream 'server' ({any_upstream.dialect}) lacks the trace extension"
        assert response.error == told


FOUND = {
    "triton": "dialect triton: {url} names itself 'triton', version '",
    "kserve": "dialect kserve: {url} names itself 'kserve', version '",
    "mlserver": "dialect json: {url} names itself 'mlserver', version '",
    "openvino": "dialect openvino: {url} names itself 'OpenVINO Model Server', version '",
}


def test_the_detected_dialect_is_logged_once(
    via_gateway: Client, any_gateway: Gateway, any_upstream: Reached
) -> None:
    assert via_gateway.get("/v2").status == 200
    (line,) = [line for line in any_gateway.log.splitlines() if ": dialect " in line]
    assert " INFO tensorgate.upstream: upstream server: " in line
    assert FOUND[any_upstream.name].format(url=any_upstream.url) in line


@contextmanager
def before(server: RealServer, folder: Path, **route: str) -> Iterator[Client]:
    """Run a gateway in front of a server, and connect to it."""
    with (
        running_gateway(folder, server.http_url, dialect=server.dialect, route=route) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        yield client


@pytest.mark.mlserver
def test_nonfinite_values_reach_mlserver_as_strings(mlserver: MLServer, tmp_path: Path) -> None:
    """It has null for all of them."""
    with before(mlserver, tmp_path, nonfinite="string") as client:
        for binary in (True, False):
            sent = tensor("INPUT0", "FP32", [np.nan, np.inf, 1], binary=binary)
            request = Request("identity_fp32", (sent,), binary_data_output=True)
            (output,) = read_outputs(send(client, request))
            np.testing.assert_array_equal(output.elements, [np.nan, np.nan, 1])


@pytest.mark.mlserver
def test_bytes_reach_mlserver_nested_and_in_base64(mlserver: MLServer, tmp_path: Path) -> None:
    """It loses nested ones without a word."""
    nested = tensor("INPUT0", "BYTES", [b"a", b"b"], [2, 1])
    no_text = tensor("INPUT0", "BYTES", [b"\xff\x00", b"", b"a"], binary=True)
    with before(mlserver, tmp_path, bytes="base64") as client:
        for sent in (nested, no_text):
            request = Request("identity_bytes", (sent,), binary_data_output=True)
            check_echo(read_outputs(send(client, request)), sent)


@pytest.mark.kserve
def test_v1_clients_of_kserve_models_that_give_the_id_back_need_none(
    kserve: KServe, tmp_path: Path
) -> None:
    headers = {"Content-Type": "application/json"}
    with before(kserve, tmp_path) as client:
        target = "/v1/models/gives_id_back:predict"
        response = client.send("POST", target, b'{"instances": [0.5, 2]}', headers)
        assert (response.status, response.fields) == (200, {"predictions": [0.5, 2]})
