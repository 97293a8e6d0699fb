"""The real Triton of the integration tests starts, serves its models and stops."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton_http
from tritonclient.utils import triton_to_np_dtype

from tests.integration.environment import MissingServerError
from tests.integration.support.real_server import HOST, ServerError
from tests.integration.triton import install, installation
from tests.integration.triton.models import DATATYPES, MODELS, named
from tests.integration.triton.server import SHARED_MEMORY, TritonServer

pytestmark = pytest.mark.triton

ROOT = Path(__file__).parents[3]


@pytest.fixture
def client(triton: TritonServer) -> Iterator[Any]:
    client = triton_http.InferenceServerClient(f"{HOST}:{triton.http_port}")
    yield client
    client.close()


def post(
    server: TritonServer, path: str, body: bytes, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(HOST, server.http_port, timeout=30)
    try:
        connection.request("POST", path, body, headers or {})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def infer(server: TritonServer, model: str, *inputs: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    body = json.dumps({"inputs": list(inputs)}).encode()
    status, _headers, response = post(server, f"/v2/models/{model}/infer", body)
    return status, json.loads(response)


def json_tensor(datatype: str, data: list[Any], name: str = "INPUT0") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [len(data)], "data": data}


def infer_binary(
    server: TritonServer, model: str, datatype: str, shape: list[int], tensor: bytes
) -> bytes:
    """Send INPUT0 in binary form, give the bytes of the one output."""
    size = {"binary_data_size": len(tensor)}
    spec = {"name": "INPUT0", "datatype": datatype, "shape": shape, "parameters": size}
    asked = {"inputs": [spec], "parameters": {"binary_data_output": True}}
    header = json.dumps(asked).encode()
    length = {"Inference-Header-Content-Length": str(len(header))}
    status, headers, response = post(server, f"/v2/models/{model}/infer", header + tensor, length)
    assert status == 200, response
    return response[int(headers["Inference-Header-Content-Length"]) :]


def regions(server: TritonServer) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"{server.region_prefix}*"))


def gone(pid: int, within: float = 20.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_each_model_version_is_ready(client: Any, model: Any) -> None:
    for version in model.versions:
        assert client.is_model_ready(model.name, str(version))


@pytest.mark.parametrize("datatype", [each for each in DATATYPES if each != "BF16"])
def test_identity_by_tritonclient(client: Any, datatype: str) -> None:
    dtype = triton_to_np_dtype(datatype)
    sent = np.array([b"", b"a\x00\xff"] if datatype == "BYTES" else [0, 1, 1], dtype=dtype)
    tensor = triton_http.InferInput("INPUT0", list(sent.shape), datatype)
    tensor.set_data_from_numpy(sent)
    response = client.infer(f"identity_{datatype.lower()}", [tensor]).as_numpy("OUTPUT0")
    assert response.dtype == sent.dtype
    assert response.tolist() == sent.tolist()


def test_identity_bf16_as_plain_bytes(triton: TritonServer) -> None:
    tensor = bytes(range(10))
    assert infer_binary(triton, "identity_bf16", "BF16", [5], tensor) == tensor


def test_identity_of_two_dimensions(triton: TritonServer) -> None:
    tensor = bytes(range(24))
    assert infer_binary(triton, "identity_fp32_2d", "FP32", [2, 3], tensor) == tensor


def test_image(triton: TritonServer) -> None:
    tensor = bytes(150_528 * 4)
    assert infer_binary(triton, "image", "FP32", [1, 3, 224, 224], tensor) == tensor


def test_add(triton: TritonServer) -> None:
    inputs = json_tensor("FP32", [3, 4]), json_tensor("FP32", [1, 1], "INPUT1")
    status, response = infer(triton, "add", *inputs)
    assert status == 200
    assert {each["name"]: each["data"] for each in response["outputs"]} == {
        "SUM": [4.0, 5.0],
        "DIFFERENCE": [2.0, 3.0],
    }


def test_mixed(triton: TritonServer) -> None:
    sent: dict[str, list[Any]] = {
        "FP32": [0.5],
        "INT64": [-(2**63), 2],
        "BYTES": ["a", "é", ""],
        "BOOL": [True, False],
    }
    status, response = infer(
        triton, "mixed", *(json_tensor(key, value, f"IN_{key}") for key, value in sent.items())
    )
    assert status == 200
    assert [(each["name"], each["data"]) for each in response["outputs"]] == [
        (f"OUT_{key}", value) for key, value in sent.items()
    ]


def test_zeros(triton: TritonServer) -> None:
    count = np.array([1000], dtype="<i4").tobytes()
    assert infer_binary(triton, "zeros", "INT32", [1], count) == bytes(4000)


def test_bad_bytes(triton: TritonServer) -> None:
    response = infer_binary(triton, "bad_bytes", "BYTES", [1], b"\x01\0\0\0a")
    assert response == b"\x02\0\0\0\xffa"


def test_slow(triton: TritonServer) -> None:
    began = time.monotonic()
    assert infer(triton, "slow", json_tensor("FP32", [0.2]))[0] == 200
    assert time.monotonic() - began > 0.2


def test_fails(triton: TritonServer) -> None:
    status, response = infer(triton, "fails", json_tensor("FP32", [1]))
    assert status == 500
    assert "this model always fails" in response["error"]


@pytest.mark.parametrize("version", [1, 2])
def test_versioned(triton: TritonServer, version: int) -> None:
    status, response = infer(triton, f"versioned/versions/{version}", json_tensor("FP32", [1]))
    assert status == 200
    assert response["outputs"][0]["data"] == [version]


def test_with_parameters(triton: TritonServer) -> None:
    parameters = {"text": "a", "number": 2, "flag": True}
    asked = {"parameters": parameters, "inputs": [json_tensor("FP32", [1])]}
    path = "/v2/models/with_parameters/infer"
    _status, _headers, response = post(triton, path, json.dumps(asked).encode())
    assert json.loads(json.loads(response)["outputs"][0]["data"][0]) == parameters


def test_stream_sends_events_one_by_one(triton: TritonServer) -> None:
    connection = http.client.HTTPConnection(HOST, triton.http_port, timeout=30)
    connection.request("POST", "/v2/models/stream/generate_stream", b'{"text_input": "hi"}')
    response = connection.getresponse()
    assert response.getheader("Content-Type", "").startswith("text/event-stream")
    arrivals, texts = [], []
    for line in response:
        if line.startswith(b"data:"):
            arrivals.append(time.monotonic())
            texts.append(json.loads(line[5:])["text_output"])
    connection.close()
    assert texts == [f"hi {number}" for number in range(5)]
    assert arrivals[-1] - arrivals[0] > 0.1


def test_trace_settings_can_be_read_and_updated(client: Any) -> None:
    assert client.get_trace_settings()["trace_level"] == ["TIMESTAMPS"]
    updated = client.update_trace_settings("add", {"trace_rate": "7"})
    assert updated["trace_rate"] == "7"
    cleared = client.update_trace_settings("add", {"trace_rate": None})
    assert cleared["trace_rate"] == "1000"


def test_models_can_be_unloaded_and_loaded(client: Any) -> None:
    client.unload_model("add")
    while client.is_model_ready("add"):
        time.sleep(0.05)
    client.load_model("add")
    assert client.is_model_ready("add")


def test_metrics_and_process(triton: TritonServer) -> None:
    connection = http.client.HTTPConnection(HOST, triton.metrics_port, timeout=30)
    connection.request("GET", "/metrics")
    assert b"nv_inference_request_success" in connection.getresponse().read()
    connection.close()
    assert triton.is_alive()
    assert Path(f"/proc/{triton.pid}").exists()
    assert triton.log_path.exists()


def test_stop_leaves_nothing() -> None:
    server = TritonServer(named("add"))
    with server:
        pid, log = server.pid, server.log_path
        assert regions(server)
    assert gone(pid)
    assert not log.exists()
    assert not regions(server)
    assert not server.is_alive()


def test_stop_by_force_leaves_nothing() -> None:
    server = TritonServer(named("add"))
    server.start()
    pid = server.pid
    server.stop(patience=0.0)
    assert gone(pid)
    assert not regions(server)


def test_a_crash_is_seen() -> None:
    """Triton 2.51 parses nested JSON by recursion, and ends with it."""
    data = "[" * 100_000 + "1" + "]" * 100_000
    tensor = '{"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": ' + data + "}"
    body = b'{"inputs": [' + tensor.encode() + b"]}"
    with TritonServer(named("identity_fp32")) as server:
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            post(server, "/v2/models/identity_fp32/infer", body)
        assert server.wait() == -signal.SIGSEGV
        assert not server.is_alive()
    assert not regions(server)


@pytest.mark.parametrize("kind", ["http_port", "grpc_port", "metrics_port"])
def test_a_port_in_use_is_told(triton: TritonServer, kind: str) -> None:
    taken = getattr(triton, kind)
    with pytest.raises(ServerError, match=f"{taken}: Address already in use"):
        TritonServer(named("add"), **{kind: taken})


def test_a_failed_start_shows_the_log_and_leaves_nothing() -> None:
    """As when another program takes the port in the last moment."""
    server = TritonServer(named("add"))
    with socket.socket() as taken:
        taken.bind((HOST, server.http_port))
        taken.listen()
        with pytest.raises(ServerError, match="already in use"):
            server.start()
    assert not regions(server)
    assert not server.is_alive()


def test_server_ends_when_its_starter_is_killed() -> None:
    script = (
        "from tests.integration.triton.models import named\n"
        "from tests.integration.triton.server import TritonServer\n"
        "import time\n"
        "server = TritonServer(named('add'))\n"
        "server.start()\n"
        "print(server.pid, server.log_path.parent, flush=True)\n"
        "time.sleep(60)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    with starter:
        assert starter.stdout is not None
        pid, folder = starter.stdout.readline().decode().split()
        starter.send_signal(signal.SIGKILL)
    assert gone(int(pid))
    subprocess.run(["rm", "-r", folder], check=True)


def test_shared_libraries_are_all_there() -> None:
    install.check_libraries(installation.find())


def test_missing_installation_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MissingServerError, match="make test"):
        installation.find(tmp_path)
