"""A server for small requests with prepared responses, one for each model and operation.

It only looks at the target and for the end of each request. A client may not send a request before
the response to the last one. Models are called ``static_COUNT``, by the FP32 values in a response;
every other target gets the response of 16 values.

Usage: python -m benchmarks.servers.static_server; it prints two ports. The first
responds to V2 inference in JSON, the second with the same tensor in binary form.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from functools import partial
from typing import cast

import orjson
import uvloop

from benchmarks.harness.client import HOST
from benchmarks.harness.requests import HEADER_LENGTH, Values, normal

COUNTS = (16, 1_000)

_BACKLOG = 4096
"""As in real servers (Triton 1,024, uvicorn 2,048). A proxy may open 1,000 connections at once;
from a queue of 100 (asyncio), the kernel would drop some, which try again after a second."""

_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: *(\d+)")


class _Connection(asyncio.Protocol):
    __slots__ = ("_default", "_received", "_responses", "_transport")

    def __init__(self, responses: Mapping[bytes, bytes], default: bytes) -> None:
        self._responses = responses
        self._default = default
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._received:
            data = self._received + data
        if _is_whole(data):
            target = data[data.find(b" ") + 1 : data.find(b" HTTP/1.1")]
            self._transport.write(self._responses.get(target, self._default))
            data = b""
        self._received = data


def _is_whole(text: bytes) -> bool:
    end = text.find(b"\r\n\r\n")
    if end < 0:
        return False
    length = _LENGTH.search(text, 0, end)
    return len(text) >= end + 4 + (0 if length is None else int(length[1]))


def json_response(values: Values) -> bytes:
    """Return the response to inference at the first port."""
    return _json_http(_document(values, {"data": values}))


def binary_response(values: Values) -> bytes:
    """Return the response to inference at the second port."""
    header = orjson.dumps(_document(values, {"parameters": {"binary_data_size": values.nbytes}}))
    fields = ("Content-Type: application/octet-stream", f"{HEADER_LENGTH}: {len(header)}")
    return _http(header + values.tobytes(), *fields)


def _other_responses(values: Values) -> dict[bytes, bytes]:
    """Return the responses to all but V2 inference, by target."""
    name = f"static_{values.size}"
    tensor = {"datatype": "FP32", "shape": [-1]}
    metadata = {
        "name": name,
        "versions": ["1"],
        "platform": "static",
        "inputs": [{"name": "INPUT0", **tensor}],
        "outputs": [{"name": "OUTPUT0", **tensor}],
    }
    texts = {
        f"/v1/models/{name}:predict": _json_http({"predictions": values}),
        f"/v2/models/{name}": _json_http(metadata),
        f"/v2/models/{name}/config": _json_http({"name": name, "max_batch_size": 0}),
        f"/v2/models/{name}/generate": _json_http({"model_name": name, "text_output": "text"}),
        f"/v2/models/{name}/ready": _http(b""),
    }
    return {target.encode(): response for target, response in texts.items()}


def _document(values: Values, content: dict[str, object]) -> dict[str, object]:
    output = {"name": "OUTPUT0", "datatype": "FP32", "shape": [values.size], **content}
    return {"model_name": "static", "model_version": "1", "outputs": [output]}


def _json_http(document: object) -> bytes:
    body = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return _http(body, "Content-Type: application/json")


def _http(body: bytes, *fields: str) -> bytes:
    lines = ("HTTP/1.1 200 OK", *fields, f"Content-Length: {len(body)}", "", "")
    return "\r\n".join(lines).encode() + body


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    servers = []
    for infer_response in (json_response, binary_response):
        responses: dict[bytes, bytes] = {}
        for count in COUNTS:
            values = normal(count)
            responses |= _other_responses(values)
            responses[f"/v2/models/static_{count}/infer".encode()] = infer_response(values)
        connection = partial(_Connection, responses, infer_response(normal(COUNTS[0])))
        servers.append(await loop.create_server(connection, HOST, 0, backlog=_BACKLOG))
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    uvloop.run(_serve())
