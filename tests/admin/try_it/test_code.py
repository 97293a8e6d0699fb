"""The code that does the same: read by a shell's rules, and run with a client that records."""

import base64
import json
import shlex
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from gateway.admin.try_it.code import client_address, write_curl, write_python
from gateway.admin.try_it.requests import FORMS, make_request
from gateway.protocol.datatypes import DATATYPES
from gateway.upstream.transport import UpstreamRequest
from tests.admin.site import make_settings
from tests.admin.try_it.trying import VALUES, call
from tests.codec.reference import DTYPES

URL = "http://127.0.0.1:8080"
NUMBERS = {"name": "x", "datatype": "FP32", "shape": [2], "values": [1.5, -2]}
HEADER = "$(id) `id` 'x' \"y\" \\"
HOSTILE = [
    "a'b\"c",
    "a\nb\r\n",
    "$(touch /tmp/x)`id`",
    "\\'); import os #",
    "{x!r}",
    "a/../b",
    "..",
    "é😀",
    "x" * 10_000,
]


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({"listen": "127.0.0.1:8080"}, "http://127.0.0.1:8080"),
        ({"listen": "0.0.0.0:80"}, "http://127.0.0.1:80"),
        ({"listen": "[::]:80"}, "http://[::1]:80"),
        ({"listen": ["[fe80::1]:80", "127.0.0.1:1"]}, "http://[fe80::1]:80"),
        ({"listen": "unix:/run/g"}, "unix:/run/g"),
        (
            {"listen": "0.0.0.0:443", "tls": {"certificate": "/c", "key": "/k"}},
            "https://127.0.0.1:443",
        ),
    ],
)
def test_address_is_one_that_clients_can_connect_to(settings: dict[str, Any], address: str) -> None:
    assert client_address(make_settings(**settings)) == address


def _request(form: str, model: str = "m", *inputs: dict[str, Any]) -> UpstreamRequest:
    wanted = call(form, *(inputs or (NUMBERS,)))
    return FORMS[form](make_request(wanted.inputs, []), model, "")


def _curl(address: str, request: UpstreamRequest) -> list[str]:
    """Return the words of the command; it must be one."""
    (first, *words) = shlex.split(write_curl(address, request).replace("\\\n", " "))
    assert first == "curl"
    return words


def test_curl_has_a_small_text_in_the_command_and_reads_other_bodies_of_a_file() -> None:
    """tests/interop/test_try_it_curl.py runs the commands, with hostile names too."""
    request = _request("json", "it's", {**NUMBERS, "name": "it's"})
    request.headers["X-Key"] = HEADER
    options, text = _curl(URL, request)[:-1], _curl(URL, request)[-1]
    assert options == [
        *("--path-as-is", f"{URL}/v2/models/it's/infer", "-H", "Content-Type: application/json"),
        *("-H", f"X-Key: {HEADER}", "--data-raw"),
    ]
    assert json.loads(text)["inputs"][0]["name"] == "it's"
    large = {"name": "x", "datatype": "FP32", "shape": [1000], "fill": "random"}
    for form in ("binary", "grpc", "json"):
        words = _curl(URL, _request(form, "m", large))
        assert words[words.index("--data-binary") + 1] == "@body.bin"
        assert ("--output" in words) == (form != "json")
        assert ("--http2-prior-knowledge" in words) == (form == "grpc")
    words = _curl("unix:/run/a b'c", _request("json"))
    assert words[1:4] == ["--unix-socket", "/run/a b'c", "http://localhost/v2/models/m/infer"]
    assert "--http2" in _curl("https://127.0.0.1:1", _request("grpc"))


class _Client:
    """A client of tritonclient that records, and returns what it gets."""

    def __init__(self, is_grpc: bool) -> None:
        self._is_grpc = is_grpc
        self.address = ""
        self.options: dict[str, Any] = {}
        self.arguments: tuple[Any, ...] = ()
        self.wanted: dict[str, Any] = {}
        self.printed: list[Any] = []

    def __call__(self, address: str, **options: Any) -> "_Client":
        self.address, self.options = address, options
        return self

    def infer(self, *arguments: Any, **wanted: Any) -> "_Client":
        self.arguments, self.wanted = arguments, wanted
        return self

    def as_numpy(self, name: str) -> str:
        return f"array of {name}"

    def get_response(self) -> Any:
        if self._is_grpc:
            return mock.Mock(outputs=[mock.Mock()])
        return {"outputs": [{"name": "every"}]}


def _run(form: str, *inputs: dict[str, Any], address: str = URL, **more: Any) -> _Client:
    """Run the code with a client that records."""
    wanted = call(form, *inputs, **{"outputs": ["y"], **more})
    code = write_python(address, wanted, wanted.outputs)
    module = tritonclient.grpc if form == "grpc" else tritonclient.http
    client = _Client(form == "grpc")
    with mock.patch.object(module, "InferenceServerClient", client):
        exec(code, {"print": lambda *words: client.printed.append(words)})  # it is the test
    return client


def _sent(tensor: Any) -> Any:
    """Return the elements that an InferInput would send."""
    if isinstance(tensor, tritonclient.grpc.InferInput):
        return tensor._raw_content
    return tensor._raw_data if tensor._raw_data is not None else tensor._data


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("form", FORMS)
def test_python_sends_the_same_tensors(form: str, datatype: str) -> None:
    values = VALUES[datatype]
    shape = [len(values), 1]
    base = {"name": "x", "datatype": datatype, "shape": shape}
    (expected,) = make_request(call(form, {**base, "values": values}).inputs, []).tensors
    assert not isinstance(expected, int)
    data = b"".join(expected)
    encoded = base64.b64encode(data).decode()
    for source in ({"values": values}, {"values": [[v] for v in values]}, {"bytes": encoded}):
        client = _run(form, {**base, **source})
        (tensor,) = client.arguments[1]
        assert (tensor.name(), tensor.datatype(), tensor.shape()) == ("x", datatype, shape)
        if form != "json" or datatype == "BF16":
            assert _sent(tensor) == data
        elif datatype == "BYTES":
            assert _sent(tensor) == values
        else:
            assert np.array(_sent(tensor), DTYPES[datatype]).tobytes() == data
        assert client.printed == [("y", "array of y")]


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("fill", ["zeros", "ones", "random"])
@pytest.mark.parametrize("shape", [[], [2, 3]], ids=str)
def test_python_fills_tensors(datatype: str, fill: str, shape: list[int]) -> None:
    tensor = {"name": "x", "datatype": datatype, "shape": shape, "fill": fill}
    (sent,) = _run("grpc", tensor).arguments[1]
    assert list(sent.shape()) == shape
    if fill != "random":
        (expected,) = make_request(call("grpc", tensor).inputs, []).tensors
        assert not isinstance(expected, int)
        assert _sent(sent) == b"".join(expected)


def test_python_reads_large_tensors_of_files(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    numbers = np.arange(1000, dtype=ml_dtypes.bfloat16)
    texts = b"\1\0\0\0x" * 1000
    (tmp_path / "input0.bin").write_bytes(numbers.tobytes())
    (tmp_path / "input1.bin").write_bytes(texts)
    inputs = (
        {"name": "a", "datatype": "BF16", "shape": [1000], "values": numbers.tolist()},
        {
            "name": "b",
            "datatype": "BYTES",
            "shape": [1000],
            "bytes": base64.b64encode(texts).decode(),
        },
    )
    one, other = _run("binary", *inputs).arguments[1]
    assert (_sent(one), _sent(other)) == (numbers.tobytes(), texts)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_python_quotes_names(form: str, name: str) -> None:
    tensor = {"name": name, "datatype": "BYTES", "shape": [1], "values": [name[:500]]}
    headers = {"X-Key": HEADER}
    client = _run(form, tensor, model=name, version=name, outputs=[name], headers=headers)
    assert client.arguments[0] == name
    assert client.arguments[1][0].name() == name
    assert client.wanted["model_version"] == name
    assert client.wanted["headers"] == {"x-key": HEADER}
    assert client.wanted["outputs"][0].name() == name
    assert client.printed == [(name, f"array of {name}")]


@pytest.mark.parametrize("form", FORMS)
def test_python_prints_all_outputs_if_none_are_named(form: str) -> None:
    client = _run(form, NUMBERS, outputs=[])
    assert client.wanted == {}
    assert len(client.printed) == 1


def test_python_connects_as_the_address_says() -> None:
    assert _run("json", NUMBERS, address="https://h:1").options == {"ssl": True}
    assert _run("grpc", NUMBERS, address="https://h:1").address == "h:1"
    assert _run("grpc", NUMBERS, address="unix:/run/g").address == "unix:/run/g"
    code = write_python("unix:/run/g", call("json", NUMBERS), [])
    assert code.startswith("# tritonclient has no Unix sockets for HTTP")
