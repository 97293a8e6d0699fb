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
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

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


_DTYPES: dict[str, npt.DTypeLike] = {
    "BOOL": "?",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
    "BYTES": "O",
    "UINT8": "<u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "<i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
}
_PARAMETERS = "Could not parse request parameters"
_INPUT = "Could not parse input content. Not valid ndarray detected"
_LENGTH_INVALID = "Inference-Header-Content-Length header is invalid and couldn't be parsed"
_BINARY_EXCEEDED = "Received buffer size is smaller than binary_data_size parameter indicates"
_BOTH = "Request contains values both in binary data and in content value"
_MIXED = (
    "Passing buffers both in ModelInferRequest::InferInputTensor::contents and in "
    "ModelInferRequest::raw_input_contents is not allowed"
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
    """Read a request; raises RefusedError."""
    end = _header_length(header_length, len(body))
    fields = _parsed(body[:end])
    for parameters in _all_parameters(fields):
        _check_parameters(parameters)
    entries = fields.get("inputs")
    if not entries:
        raise RefusedError(400, "Invalid JSON structure, missing inputs")
    tensors = {each["name"]: _tensor(each) for each in entries}
    _take_raw(list(zip(entries, tensors.values(), strict=True)), body[end:])
    _check_names(set(tensors), model)
    arrays = {name: tensor.array() for name, tensor in tensors.items()}
    return ParsedRequest(fields.get("id", ""), arrays, _binary_outputs(fields))


@dataclass(slots=True)
class _Tensor:
    datatype: str
    shape: tuple[int, ...]
    elements: list[Any]
    raw: bytes | None = None

    def array(self) -> npt.NDArray[Any]:
        """Return the tensor; raises RefusedError where elements and shape do not fit together."""
        dtype, count = np.dtype(_DTYPES[self.datatype]), math.prod(self.shape)
        if self.raw is None:
            elements = self.elements
            if self.datatype == "FP64":  # which it takes for FP32 on the way
                elements = np.array(elements, np.float32).tolist()
        elif self.datatype == "BYTES":
            elements = list(_split(self.raw))
        else:
            if len(self.raw) != count * dtype.itemsize:
                raise RefusedError(400, "Invalid content size of tensor proto")
            return np.frombuffer(self.raw, dtype).reshape(self.shape)
        if len(elements) != count:
            raise RefusedError(400, "Invalid number of values in tensor proto container")
        return np.array([*elements, None], object)[:-1].astype(dtype).reshape(self.shape)


def _header_length(text: str | None, body: int) -> int:
    if text is None:
        return body
    if not text.isdigit():
        raise RefusedError(500, _LENGTH_INVALID)
    if int(text) > body:
        raise RefusedError(
            500, "Inference-Header-Content-Length header exceeds actual payload length"
        )
    return int(text)


def _parsed(text: bytes) -> dict[str, Any]:
    """Read the JSON part, which ends at a NUL; it is nothing at all in a raw binary request."""
    try:
        fields = json.loads(text.partition(b"\0")[0])
    except ValueError as error:
        raise RefusedError(412, f"The file is not valid json - {error}") from None
    if not isinstance(fields, dict):
        raise RefusedError(400, "Request body should be JSON object")
    return fields


def _take_raw(inputs: list[tuple[dict[str, Any], _Tensor]], rest: bytes) -> None:
    """Return each input that has no elements in JSON its bytes; nobody looks at what is left over.

    All inputs have to be binary, or none.
    """
    raw = [each for each in inputs if not each[1].elements]
    if any("binary_data_size" in _parameters(entry) for entry, tensor in inputs if tensor.elements):
        raise RefusedError(500, _BOTH)
    for entry, tensor in raw:
        size = _size(entry, tensor, len(inputs), len(rest))
        if size > len(rest):
            raise RefusedError(400, _BINARY_EXCEEDED)
        tensor.raw, rest = rest[:size], rest[size:]
    if len(raw) not in (0, len(inputs)):
        raise RefusedError(400, _MIXED)


def _parameters(entry: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = entry.get("parameters", {})
    return parameters


def _all_parameters(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for each in (fields, *fields.get("inputs", ()), *fields.get("outputs", ())):
        yield _parameters(each)


def _check_parameters(parameters: Any) -> None:
    """Refuse all but texts, truth values and integers of 32 bits."""
    for value in parameters.values():
        is_small = isinstance(value, int) and -(2**31) <= value < 2**31
        if not (is_small or isinstance(value, str)):
            raise RefusedError(400, _PARAMETERS)


def _tensor(entry: dict[str, Any]) -> _Tensor:
    datatype = entry["datatype"]
    if "data" in entry and datatype in ("FP16", "BF16"):
        raise RefusedError(400, _INPUT)
    if datatype not in _DTYPES:
        raise RefusedError(400, "Invalid input precision")
    elements = list(_flat(entry.get("data", []), datatype))
    return _Tensor(datatype, tuple(entry["shape"]), elements)


def _flat(data: Any, datatype: str) -> Iterator[Any]:
    if not isinstance(data, list):
        raise RefusedError(400, _INPUT)
    for each in data:
        if isinstance(each, list):
            yield from _flat(each, datatype)
        elif not _is_element(each, datatype):
            raise RefusedError(400, _INPUT)
        else:
            yield each.partition("\0")[0].encode() if datatype == "BYTES" else each


def _is_element(value: Any, datatype: str) -> bool:
    """Return whether it takes such a value; integers of 64 bits it does not take in JSON."""
    if datatype in ("BOOL", "BYTES"):
        return isinstance(value, bool if datatype == "BOOL" else str)
    if isinstance(value, bool) or not isinstance(value, int):
        return isinstance(value, float) and datatype in ("FP32", "FP64")
    if datatype.startswith("UINT"):
        return 0 <= value < 2**32
    return -(2**31) <= value < 2**31 or datatype.startswith("FP")


def _size(entry: dict[str, Any], tensor: _Tensor, inputs: int, rest: int) -> int:
    """Find how many bytes are an input's, which need not be said where its shape tells it."""
    size = _parameters(entry).get("binary_data_size")
    if size is not None:
        if not isinstance(size, int) or size < 0:
            raise RefusedError(400, "binary_data_size parameter is invalid and cannot be parsed")
        return size
    if tensor.datatype != "BYTES":
        return math.prod(tensor.shape) * np.dtype(_DTYPES[tensor.datatype]).itemsize
    if "data" not in entry and (inputs > 1 or tensor.shape != (1,)):
        raise RefusedError(400, _INPUT)
    return rest


def _check_names(names: set[str], model: Model) -> None:
    declared = {each.name for each in model.inputs}
    if len(names) != len(declared):
        raise RefusedError(400, "Invalid number of inputs")
    if names != declared:
        raise RefusedError(400, "Missing input with specific name")


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


def _split(raw: bytes) -> Iterator[bytes]:
    while raw:
        if len(raw) < 4 or len(raw) < 4 + (size := struct.unpack_from("<I", raw)[0]):
            raise RefusedError(400, "Invalid content size of tensor proto")
        yield raw[4 : 4 + size]
        raw = raw[4 + size :]


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
        data = _bytes(array)
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


def _bytes(array: npt.NDArray[Any]) -> bytes:
    if array.dtype != object:
        return array.tobytes()
    return b"".join(struct.pack("<I", len(each)) + each for each in array.ravel())


class OpenVino:
    """The server, in threads of this process; a context manager."""

    name = "openvino"
    dialect = "openvino"
    datatypes = DATATYPES
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
        body, status, binary = self._body(), 200, b""
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
        if self.command != "HEAD":
            self.wfile.write(text + binary)
        self.wfile.flush()

    do_GET = do_POST = do_HEAD = do_PUT = do_DELETE = do_PATCH = _serve  # noqa: N815

    def _response(self, body: bytes) -> tuple[bytes, bytes]:
        """Return the JSON part of the response, and the binary one; raises RefusedError."""
        if self.command not in ("GET", "POST"):
            raise RefusedError(406, "Unsupported method")
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

    def _body(self) -> bytes:
        if self.headers["Transfer-Encoding"] is None:
            return self.rfile.read(int(self.headers["Content-Length"] or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

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
