"""A server that speaks as OpenVINO Model Server does; it stands in for the real one.

There is no real one to be had from a package index. What this one does was read in the source of
OpenVINO Model Server 2026.3 (http_server.cpp, http_rest_api_handler.cpp, rest_parser.cpp and
rest_utils.cpp), its oddities too. It serves models that Triton has in the tests.
"""

from __future__ import annotations

import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from tests.integration.triton import models as triton
from tests.support.servers.numpy_models import WORK
from tests.support.servers.openvino.request import RefusedError, parse_request
from tests.support.servers.openvino.response import error_body, infer_response, metadata_body

HOST = "127.0.0.1"

_PATH = re.compile(r"/v2/models/([^/]+)(?:/versions/([0-9]+))?(?:/(ready|infer)|/)?")
_LENGTH = "Inference-Header-Content-Length"

# It takes FP16, but has no way to give it back.
DATATYPES = tuple(each for each in triton.DATATYPES if each not in ("FP16", "BF16"))
MODELS = triton.named(
    *(f"identity_{datatype.lower()}" for datatype in DATATYPES), "identity_fp16", "add", "mixed"
)


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

    def do_GET(self) -> None:
        found = _PATH.fullmatch(self.path)
        if self.path in ("/v2/health/live", "/v2/health/ready"):
            self._send(200, b"")
        elif self.path == "/v2":
            # Without "extensions": a list that is empty is not written.
            self._send(200, b'{"name":"OpenVINO Model Server","version":"2026.3"}')
        elif found and found[3] != "infer":
            self._send_metadata(found)
        else:
            self._send_error(400, "Invalid request URL")

    def do_POST(self) -> None:
        body = self._body()
        found = _PATH.fullmatch(self.path)
        if not found or found[3] != "infer":
            self._send_error(400, "Invalid request URL")
            return
        try:
            model = _model(found)
            request = parse_request(body, self.headers[_LENGTH], model)
            text, binary = infer_response(model, request, WORK[model.source](request.arrays))
        except RefusedError as error:
            self._send_error(error.status, error.message)
            return
        # Only bytes make it tell where they begin.
        lengths = {_LENGTH.lower(): str(len(text))} if binary else {}
        self._send(200, text + binary, lengths)

    def _unsupported(self) -> None:
        self._body()
        self._send_error(406, "Unsupported method")

    do_HEAD = do_PUT = do_DELETE = do_PATCH = _unsupported  # noqa: N815

    def _send_metadata(self, found: re.Match[str]) -> None:
        try:
            model = _model(found)
        except RefusedError as error:
            self._send_error(error.status, error.message)
            return
        if found[3] == "ready":
            self._send(200, b"")
        else:
            self._send(200, metadata_body(model))

    def _body(self) -> bytes:
        if self.headers["Transfer-Encoding"] is None:
            return self.rfile.read(int(self.headers["Content-Length"] or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send_error(self, status: int, message: str) -> None:
        self._send(status, error_body(message))

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        # Whatever the body is.
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

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
