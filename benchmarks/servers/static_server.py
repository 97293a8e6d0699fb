"""A server for small requests with one prepared response.

It only looks for the end of each request. A client may not send a request before the response to
the last one.

Usage: python -m benchmarks.servers.static_server; it prints two ports. The first
responds in JSON, the second with the same tensor in binary form.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import cast

import orjson
import uvloop

from benchmarks.harness.client import HOST
from benchmarks.harness.requests import HEADER_LENGTH, normal

_BACKLOG = 4096
"""As in real servers (Triton 1,024, uvicorn 2,048). A proxy may open 1,000 connections at once;
from a queue of 100 (asyncio), the kernel would drop some, which try again after a second."""

_VALUES = normal(16)
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: *(\d+)")


class _Connection(asyncio.Protocol):
    __slots__ = ("_received", "_response", "_transport")

    def __init__(self, response: bytes) -> None:
        self._response = response
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._received:
            data = self._received + data
        if _is_whole(data):
            self._transport.write(self._response)
            data = b""
        self._received = data


def _is_whole(text: bytes) -> bool:
    end = text.find(b"\r\n\r\n")
    if end < 0:
        return False
    length = _LENGTH.search(text, 0, end)
    return len(text) >= end + 4 + (0 if length is None else int(length[1]))


def json_response() -> bytes:
    """Return the response at the first port."""
    body = orjson.dumps(_document({"data": _VALUES}), option=orjson.OPT_SERIALIZE_NUMPY)
    return _http(body, "Content-Type: application/json")


def binary_response() -> bytes:
    """Return the response at the second port."""
    header = orjson.dumps(_document({"parameters": {"binary_data_size": _VALUES.nbytes}}))
    fields = ("Content-Type: application/octet-stream", f"{HEADER_LENGTH}: {len(header)}")
    return _http(header + _VALUES.tobytes(), *fields)


def _document(content: dict[str, object]) -> dict[str, object]:
    output = {"name": "OUTPUT0", "datatype": "FP32", "shape": [_VALUES.size], **content}
    return {"model_name": "static", "model_version": "1", "outputs": [output]}


def _http(body: bytes, *fields: str) -> bytes:
    lines = ("HTTP/1.1 200 OK", *fields, f"Content-Length: {len(body)}", "", "")
    return "\r\n".join(lines).encode() + body


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(partial(_Connection, response), HOST, 0, backlog=_BACKLOG)
        for response in (json_response(), binary_response())
    ]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    uvloop.run(_serve())
