"""A server that speaks as OpenVINO Model Server does; it stands in for the real one.

There is no real one to be had from a package index. What this one does was read in the source of
OpenVINO Model Server 2026.3 (http_server.cpp, http_rest_api_handler.cpp, rest_parser.cpp and
rest_utils.cpp), its oddities too. It serves models that Triton has in the tests.
"""

from __future__ import annotations

import json
import math
import re
import socket
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt

from tests.integration.support.infer_messages import decode, encode
from tests.integration.triton import models as triton
from tests.integration.triton.models import Model
from tests.support.servers.numpy_models import WORK, Arrays

HOST = "127.0.0.1"

_PATH = re.compile(r"/v2/models/([^/]+)(?:/versions/([0-9]+))?(?:/(ready|infer)|/)?")
_LENGTH = "Inference-Header-Content-Length"

# It takes FP16, but has no way to give it back.
DATATYPES = tuple(each for each in triton.DATATYPES if each not in ("FP16", "BF16"))
MODELS = triton.named(
    *(f"identity_{datatype.lower()}" for datatype in DATATYPES), "identity_fp16", "add", "mixed"
)


class RefusedError(Exception):
    """What the server answers instead."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request: its id, its inputs, and which outputs are to be binary."""

    id: str
    arrays: Arrays
    binary: frozenset[str]


def parse_request(body: bytes, header_length: str | None, model: Model) -> ParsedRequest:
    """Read a request in the form that the gateway sends; the server would refuse any other one.

    It takes as parameters texts, truth values and integers of 32 bits.
    """
    end = len(body) if header_length is None else int(header_length)
    fields, rest = json.loads(body[:end]), body[end:]
    for each in (fields, *fields["inputs"], *fields.get("outputs", ())):
        for value in _parameters(each).values():
            assert isinstance(value, str) or -(2**31) <= value < 2**31, value
    arrays = {}
    for entry in fields["inputs"]:
        assert "data" not in entry, "JSON has other rules for nearly each datatype"
        size = entry["parameters"]["binary_data_size"]
        elements = decode(entry["datatype"], rest[:size])
        arrays[entry["name"]] = elements.reshape(entry["shape"])
        rest = rest[size:]
    assert set(arrays) == {each.name for each in model.inputs}
    return ParsedRequest(fields.get("id", ""), arrays, _binary_outputs(fields))


def _parameters(entry: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = entry.get("parameters", {})
    return parameters


def _binary_outputs(fields: dict[str, Any]) -> frozenset[str]:
    """Find the outputs that are to be binary.

    Each output that it reads makes it forget the one before, so that just the last is known; and
    without any, what the request wants of all outputs is nobody's.
    """
    by_default = _parameters(fields).get("binary_data_output", False)
    return frozenset(
        output["name"]
        for output in fields.get("outputs", [])[-1:]
        if _parameters(output).get("binary_data", by_default)
    )


def metadata_body(model: Model) -> bytes:
    """Write a model's metadata."""
    fields = {
        "name": model.name,
        "versions": ["1"],
        "platform": "OpenVINO",
        "inputs": [each.metadata() for each in model.inputs],
        "outputs": [each.metadata() for each in model.outputs],
    }
    return json.dumps(fields).encode()


def infer_response(model: Model, request: ParsedRequest, arrays: Arrays) -> tuple[bytes, bytes]:
    """Write a response's JSON part and its binary one; raises RefusedError.

    All outputs come back, whichever were listed.
    """
    outputs, binary = [], b""
    for declared in model.outputs:
        array = arrays[declared.name]
        if declared.datatype == "FP16":
            message = "Could not parse input content. Unsupported data precision detected"
            raise RefusedError(400, f"{message} - Unsupported precisionFP16")
        head = {"name": declared.name, "shape": list(array.shape), "datatype": declared.datatype}
        if declared.name not in request.binary:
            outputs.append(f'{json.dumps(head)[:-1]}, "data": [{_json_data(array)}]}}')
            continue
        data = encode(declared.datatype, array.ravel())
        # A size of nothing is not told.
        size = {"parameters": {"binary_data_size": len(data)}} if data else {}
        outputs.append(json.dumps(head | size))
        binary += data
    members = {"model_name": model.name, "id": request.id, "model_version": "1"}
    text = json.dumps({key: value for key, value in members.items() if value})
    return f'{text[:-1]}, "outputs": [{", ".join(outputs)}]}}'.encode(), binary


def _json_data(array: npt.NDArray[Any]) -> str:
    """Write the elements; for what is not finite its JSON writer has nothing, not even null."""
    values = array.ravel().tolist()
    if array.dtype == object:
        return ", ".join(json.dumps(value.decode("utf-8", "replace")) for value in values)
    return ", ".join(json.dumps(value) if math.isfinite(value) else "" for value in values)


class OpenVino:
    """The server, in threads of this process; a context manager."""

    name = "openvino"
    dialect = "openvino"
    models = MODELS

    def __init__(self) -> None:
        self._server = _Server((HOST, 0), _Handler)
        self.http_port = int(self._server.server_address[1])
        self.http_url = f"http://{HOST}:{self.http_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.hang_up()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """Idle connections are kept for ever, so that they have to be ended at the end."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._connections: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.append(connection)
        return connection, address

    def hang_up(self) -> None:
        for connection in self._connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                connection.close()  # whoever was there has left


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        status, binary = 200, b""
        try:
            text, binary = self._response(body)
        except RefusedError as error:
            status, text = error.status, json.dumps({"error": error.message}).encode()
        self.send_response(status)
        # Whatever the body is.
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text + binary)))
        if binary:  # only bytes make it tell where they begin
            self.send_header(_LENGTH.lower(), str(len(text)))
        self.end_headers()
        self.wfile.write(text + binary)
        self.wfile.flush()

    do_GET = do_POST = _serve  # noqa: N815

    def _response(self, body: bytes) -> tuple[bytes, bytes]:
        """Return the JSON part of the response, and the binary one; raises RefusedError."""
        if self.command == "GET" and self.path in ("/v2/health/live", "/v2/health/ready"):
            return b"", b""
        if self.command == "GET" and self.path == "/v2":
            # Without "extensions": a list that is empty is not written.
            return b'{"name":"OpenVINO Model Server","version":"2026.3"}', b""
        found = _PATH.fullmatch(self.path)
        if not found or (found[3] == "infer") is not (self.command == "POST"):
            raise RefusedError(400, "Invalid request URL")
        model = _model(found)
        if found[3] == "infer":
            request = parse_request(body, self.headers[_LENGTH], model)
            return infer_response(model, request, WORK[model.source](request.arrays))
        return b"" if found[3] == "ready" else metadata_body(model), b""

    def log_message(self, *_arguments: Any) -> None:
        """Say nothing."""


def _model(found: re.Match[str]) -> triton.Model:
    name, version = found[1], found[2]
    model = next((each for each in MODELS if each.name == name), None)
    if model is None:
        raise RefusedError(404, "Model with requested name is not found")
    if version not in (None, "1"):
        raise RefusedError(404, "Model with requested version is not found")
    return model
